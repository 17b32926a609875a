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

#[test]
fn a_checkpoint_holds_the_values_of_the_whole_model() {
    let dir = tempfile::tempdir().unwrap();
    for (world, (name, config)) in (1..).zip(configs()) {
        let dir = dir.path().join(name);
        let whole = ranks_ok(world, |pg| {
            let trained = Trained::new(pg, 5, &config)?.train(0..2)?;
            save(pg, &dir, trained.snapshot(2))?;
            Ok(trained.model.into_dense()?)
        });
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let (loaded, _) = checkpoint
            .load_dense_model(Net::new(5, &device()), &LoadOptions::new())
            .unwrap();
        let bytes = |t: Tensor<2>| t.into_data().as_bytes().to_vec();
        let of = |net: &Net| {
            let weights = net.layers.iter().map(|layer| bytes(layer.fc.weight.val()));
            weights
                .chain([bytes(net.emb.weight.val()), bytes(net.head.val())])
                .collect::<Vec<_>>()
        };
        assert_eq!(of(&loaded), of(&whole[0]), "{name}");
        assert_ne!(of(&loaded), of(&Net::new(5, &device())), "it was trained");
    }
}

#[test]
fn copies_of_a_hybrid_mesh_are_written_once_and_loaded_by_all() {
    let dir = tempfile::tempdir().unwrap();
    let (flat, hybrid) = (dir.path().join("flat"), dir.path().join("hybrid"));
    let meshes = [(1, 4), (2, 2), (4, 1)];
    ranks_ok(3, |pg| {
        save(
            pg,
            &flat,
            Trained::new(pg, 7, &FsdpConfig::new())?
                .train(0..2)?
                .snapshot(2),
        )
    });
    let want = Checkpoint::open(&flat).unwrap();
    for (replicate, shard) in meshes {
        let hybrid = hybrid.join(format!("{replicate}x{shard}"));
        ranks_ok(4, |pg| {
            let mesh = DeviceMesh::hybrid(pg, replicate, shard)?;
            let Trained { model, optim } = Trained::on(&mesh, 7, &FsdpConfig::new())?;
            let checkpoint = Checkpoint::open_on(pg, &flat)?;
            let (model, _) = checkpoint.load_model(model, &LoadOptions::new())?;
            let (optim, _) = checkpoint.load_optimizer(optim, &model, &LoadOptions::new())?;
            save(pg, &hybrid, Trained { model, optim }.snapshot(2))
        });
        let got = Checkpoint::open(&hybrid).unwrap();
        assert_eq!(contents(&got), contents(&want), "{replicate} x {shard}");
        assert_eq!(
            got.manifest().payload_bytes(),
            want.manifest().payload_bytes()
        );
        let writers: std::collections::HashSet<_> =
            got.manifest().files.iter().map(|file| file.rank).collect();
        assert_eq!(writers.len(), 4, "all ranks write a part");
    }
}

/// A layer with running statistics.
#[derive(Module, Debug)]
struct Normed {
    fc: Linear,
    norm: burn::nn::BatchNorm,
}

impl Normed {
    fn new() -> Self {
        Self {
            fc: LinearConfig::new(3, 4).init(&device()),
            norm: burn::nn::BatchNormConfig::new(4).init(&device()),
        }
    }

    /// What evaluation makes of it, which the statistics decide.
    fn output(model: &FsdpModule<Self>) -> Vec<u8> {
        let model = model.valid();
        let x = Tensor::<2>::ones([2, 3], &Device::flex());
        let x = model.fc.forward(x).unsqueeze_dim::<3>(2);
        model.norm.forward(x).into_data().as_bytes().to_vec()
    }
}

#[test]
fn each_rank_gets_its_own_running_statistics_back_at_the_same_world_size() {
    let dir = tempfile::tempdir().unwrap();
    let new =
        |pg: &ProcessGroup| Normed::new().fully_shard(&DeviceMesh::shard(pg), &FsdpConfig::new());
    let saved = ranks_ok(2, |pg| {
        let model = new(pg)?;
        let x = Tensor::<2>::ones([2, 3], &device()) * (pg.rank() as f64 + 1.0);
        let x = model.fc.forward(x).unsqueeze_dim::<3>(2);
        model.try_backward(model.norm.forward(x).mean())?;
        save(pg, dir.path(), Snapshot::new(1).model(&model))?;
        Ok(Normed::output(&model))
    });
    assert_ne!(saved[0], saved[1]);
    let load = |pg: &ProcessGroup| {
        let checkpoint = Checkpoint::open_on(pg, dir.path())?;
        Ok(Normed::output(
            &checkpoint.load_model(new(pg)?, &LoadOptions::new())?.0,
        ))
    };
    assert_eq!(ranks_ok(2, load), saved);
    assert_eq!(ranks_ok(3, load), vec![saved[0].clone(); 3]);
}

#[test]
fn a_tensor_begins_a_new_file_when_one_is_full() {
    let dir = tempfile::tempdir().unwrap();
    ranks_ok(2, |pg| {
        let trained = Trained::new(pg, 5, &FsdpConfig::new())?.train(0..1)?;
        let mut saver = Saver::new(pg, SaveOptions::new().with_max_file_bytes(100))?;
        saver.save(dir.path().join("many"), trained.snapshot(1))?;
        save(pg, &dir.path().join("few"), trained.snapshot(1))
    });
    let [many, few] = ["many", "few"].map(|name| Checkpoint::open(dir.path().join(name)).unwrap());
    assert_eq!(contents(&many), contents(&few));
    assert_eq!(few.manifest().files.len(), 2);
    assert!(many.manifest().files.len() > 10);
    many.verify(|_| ()).unwrap();
}
