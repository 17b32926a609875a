//! How ranks form an NCCL group over a group that they have already.

use std::collections::HashMap;
use std::sync::Arc;

use super::driver::{Driver, UniqueId};
use super::engine::NcclEngine;
use super::patience::patiently;
use crate::comm::{Call, Engine};
use crate::{FsdpError, Result};

/// What a rank tells the others of itself: its device, and the id if it is rank 0; or why it can't.
type Introduction = Result<(String, Option<Vec<u8>>), String>;

impl<D: Driver> NcclEngine<D> {
    /// The engine of this rank of `group` over NCCL, which all ranks must form, each with its own
    /// device. `group` remains; the engine talks over a wire of its own between its ranks.
    ///
    /// A rank that has no driver takes part too, so that all ranks fail.
    pub(super) fn form(group: &dyn Engine, driver: Result<Arc<D>>) -> Result<Self> {
        let introduce = |driver: &Arc<D>| {
            let id = (group.rank() == 0).then(|| driver.unique_id()).transpose();
            let introduction = id.and_then(|id| Ok((driver.identity()?, id.map(Vec::from))));
            introduction.map_err(|reason| FsdpError::NcclUnavailable { reason })
        };
        let own = driver
            .as_ref()
            .map_err(FsdpError::clone)
            .and_then(introduce);
        let told: Introduction = own.clone().map_err(|error| error.to_string());
        let message = serde_json::to_vec(&told).map_err(FsdpError::other)?;
        let all = group.exchange(Call::new("forming", "an NCCL group"), message)?;
        let read = |message: &Arc<Vec<u8>>| serde_json::from_slice(message).unwrap_or_else(unread);
        let id = agree(own, all.iter().map(read).collect())?;
        let driver = driver?;
        let wire = group.control()?;
        let (joining, rank, world_size) = (driver.clone(), wire.rank(), wire.world_size());
        let join = move || joining.join(&id, rank, world_size);
        let communicator = patiently(&*wire, "joining the communicator", join)?;
        Self::new(driver, wire, communicator)
    }
}

fn unread(error: serde_json::Error) -> Introduction {
    Err(format!("its introduction can't be read: {error}"))
}

/// The id to join by, if all ranks can, each with a device of its own.
fn agree(own: Result<(String, Option<Vec<u8>>)>, all: Vec<Introduction>) -> Result<UniqueId> {
    own?;
    let mut ranks = HashMap::<String, usize>::new();
    let mut ids = Vec::new();
    for (rank, introduction) in all.into_iter().enumerate() {
        let (device, id) = introduction.map_err(|cause| FsdpError::RankFailed { rank, cause })?;
        ids.extend(id);
        if let Some(other) = ranks.insert(device.clone(), rank) {
            return Err(FsdpError::argument(format!(
                "ranks {other} and {rank} are both on {device}; NCCL needs a GPU for each rank: \
                 choose it by the rank's number on its host"
            )));
        }
    }
    let id = ids.pop().and_then(|id| id.try_into().ok());
    id.ok_or_else(|| FsdpError::argument("rank 0 has told no id to join by"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_a_gpu_are_told_so() {
        let own = || Ok(("GPU-a".to_string(), Some(vec![0; 128])));
        let other = |device: &str| Ok((device.to_string(), None));
        let all = vec![Ok(own().unwrap()), other("GPU-b"), other("GPU-a")];
        let error = agree(own(), all).unwrap_err().to_string();
        assert!(error.contains("ranks 0 and 2 are both on GPU-a"), "{error}");
    }

    #[test]
    fn all_ranks_join_by_the_id_of_rank_0() {
        let own = || Ok(("GPU-b".to_string(), None));
        let first = |id: Vec<u8>| vec![Ok(("GPU-a".to_string(), Some(id))), own()];
        let as_read = |own: Result<_, String>| own.map_err(FsdpError::argument);
        let id = agree(as_read(own()), first(vec![7; 128])).unwrap();
        assert_eq!(id, [7; 128]);
        let error = agree(as_read(own()), first(vec![7; 3])).unwrap_err();
        assert!(error.to_string().contains("no id"), "{error}");
    }

    #[test]
    fn a_rank_without_nccl_is_named_to_the_others_and_keeps_its_own_error() {
        let cause = "no libnccl".to_string();
        let own = Ok(("GPU-a".to_string(), Some(vec![0; 128])));
        let all = || {
            vec![
                Ok(("GPU-a".to_string(), Some(vec![0; 128]))),
                Err(cause.clone()),
            ]
        };
        let error = agree(own, all()).unwrap_err();
        assert!(
            matches!(error, FsdpError::RankFailed { rank: 1, .. }),
            "{error}"
        );
        let own = Err(FsdpError::NcclUnavailable {
            reason: cause.clone(),
        });
        let error = agree(own, all()).unwrap_err();
        assert!(
            matches!(error, FsdpError::NcclUnavailable { .. }),
            "{error}"
        );
    }
}
