//! Whether NCCL and the CUDA driver can be loaded, before anything that would panic if they can't.
//!
//! Both are loaded when first used, so that a build for CUDA runs without them.

use cudarc::{driver, nccl};

use crate::{FsdpError, Result};

/// The first version with `ncclCommSplit`.
const OLDEST: i32 = 2_18_01;

/// Fails unless a group over NCCL can be formed, as far as this host alone can tell.
pub(super) fn check() -> Result<()> {
    check_nccl()?;
    check_driver()
}

fn check_nccl() -> Result<()> {
    // SAFETY: loading it runs its initialisers, as any use of it does.
    if !unsafe { nccl::sys::is_culib_present() } {
        let searched = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        return Err(unavailable(format!(
            "libnccl.so is neither in a directory of LD_LIBRARY_PATH (\"{searched}\") nor known to \
             the system. Distributions and Python's nvidia-nccl-cu12 call it libnccl.so.2: make a \
             symbolic link libnccl.so to it, and name the directory in LD_LIBRARY_PATH"
        )));
    }
    let version = nccl::result::get_nccl_version();
    let version =
        version.map_err(|error| unavailable(format!("its version is unknown: {error:?}")))?;
    if version < OLDEST {
        return Err(unavailable(format!(
            "it is version {version}, older than {OLDEST}"
        )));
    }
    Ok(())
}

fn check_driver() -> Result<()> {
    // SAFETY: as above.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(unavailable(
            "libcuda.so, which comes with NVIDIA's driver, can't be loaded".to_string(),
        ));
    }
    driver::result::init()
        .map_err(|error| unavailable(format!("the CUDA driver can't be used: {error:?}")))
}

fn unavailable(reason: String) -> FsdpError {
    FsdpError::NcclUnavailable { reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_what_to_do() {
        match check() {
            Err(FsdpError::NcclUnavailable { reason }) => {
                let says = |words: &[&str]| words.iter().all(|word| reason.contains(word));
                let nccl = says(&["libnccl.so.2", "symbolic link", "LD_LIBRARY_PATH"]);
                assert!(
                    nccl || says(&["libcuda.so"]) || says(&["CUDA driver"]),
                    "{reason}"
                );
            }
            Err(other) => panic!("{other}"),
            Ok(()) => eprintln!("not tested: this host has NCCL and a driver"),
        }
    }
}
