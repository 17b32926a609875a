//! What was saved at one number of ranks is loaded at another.

use burn_fsdp::{ReshardAfterForward, dense_specs};
use burn_fsdp_dcp::{Checkpoint, LoadOptions, Region, TensorSource};

use super::*;

fn configs() -> [(&'static str, FsdpConfig); 4] {
    let on = |dim: usize| {
        FsdpConfig::new()
            .with_placement(move |p| (p.shape.len() > dim).then_some(Placement::Shard(dim)))
    };
    [
        ("rows", FsdpConfig::new()),
        ("columns", on(1)),
        (
            "replicated",
            FsdpConfig::new().with_replicate_below(usize::MAX),
        ),
        (
            "groups",
            FsdpConfig::new().with_reshard_after_forward(ReshardAfterForward::Always),
        ),
    ]
}

/// Every tensor of a checkpoint, whole.
pub(crate) fn contents(checkpoint: &Checkpoint) -> Vec<(String, Vec<u8>)> {
    let tensors = checkpoint.tensors().iter();
    tensors
        .map(|(name, info)| {
            (
                name.clone(),
                checkpoint.read(name, &Region::whole(&info.shape)).unwrap(),
            )
        })
        .collect()
}

#[test]
fn any_world_size_and_placement_loads_what_any_other_saved() {
    let dir = tempfile::tempdir().unwrap();
    for d in [1, 5, 7, 64] {
        for from in [1, 2, 3, 4, 5, 8] {
            for (name, config) in configs() {
                let dir = dir.path().join(format!("{d}-{from}-{name}"));
                ranks_ok(from, |pg| {
                    let trained = Trained::new(pg, d, &config)?.train(0..2)?;
                    save(pg, &dir, trained.snapshot(2))
                });
            }
        }
        for from in [1, 2, 3, 4, 5, 8] {
            for (name, config) in configs() {
                for to in [1, 2, 3, 4, 5, 8] {
                    let saved = dir.path().join(format!("{d}-{from}-rows"));
                    let again = dir.path().join(format!("{d}-{from}-{name}-{to}"));
                    ranks_ok(to, |pg| reload(pg, d, &config, &saved, &again));
                    let (saved, again) = (
                        Checkpoint::open(&saved).unwrap(),
                        Checkpoint::open(&again).unwrap(),
                    );
                    assert_eq!(
                        contents(&saved),
                        contents(&again),
                        "{d}: {from} -> {name} {to}"
                    );
                    std::fs::remove_dir_all(again.location()).unwrap();
                }
            }
        }
    }
}

/// Loads a checkpoint into a fresh model and saves it again.
fn reload(
    pg: &ProcessGroup,
    d: usize,
    config: &FsdpConfig,
    from: &Path,
    to: &Path,
) -> burn_fsdp_dcp::Result<()> {
    let Trained { model, optim } = Trained::new(pg, d, config)?;
    let checkpoint = Checkpoint::open_on(pg, from)?;
    let options = LoadOptions::new();
    let (model, report) = checkpoint.load_model(model, &options)?;
    assert!(report.is_exact() && report.loaded.len() == dense_specs(&Net::new(d, &device())).len());
    let (optim, _) = checkpoint.load_optimizer(optim, &model, &options)?;
    save(pg, to, Trained { model, optim }.snapshot(2))
}
