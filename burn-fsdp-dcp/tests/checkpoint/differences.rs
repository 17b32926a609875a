//! Checkpoints that are not of this model, quite.

use burn_fsdp_dcp::{Checkpoint, LoadOptions, LoadReport, load_dense_model_from};

use super::load::contents;
use super::*;

/// One layer as it was, one that has changed its name, shape or dtype, and one that is new.
#[derive(Module, Debug)]
struct Changed {
    emb: Embedding,
    layers: Vec<Layer>,
    head: Param<Tensor<2>>,
    mask: Param<Tensor<1, Bool>>,
    counts: Param<Tensor<1, Int>>,
    extra: Linear,
}

impl Changed {
    fn new(d: usize) -> Self {
        let Net {
            emb,
            mut layers,
            head,
            mask,
            counts,
        } = Net::new(d, &device());
        layers[0].fc = LinearConfig::new(d, d + 1).init(&device());
        layers.pop();
        let extra = LinearConfig::new(2, 2).with_bias(false).init(&device());
        Self {
            emb,
            layers,
            head,
            mask,
            counts,
            extra,
        }
    }
}

fn saved(dir: &Path) {
    ranks_ok(2, |pg| {
        let trained = Trained::new(pg, 4, &FsdpConfig::new())?.train(0..1)?;
        save(pg, dir, trained.snapshot(1))
    });
}

fn load_changed(dir: &Path, options: &LoadOptions) -> Vec<burn_fsdp_dcp::Result<LoadReport>> {
    ranks(2, |pg| {
        let model = Changed::new(4).fully_shard(&DeviceMesh::shard(pg), &FsdpConfig::new())?;
        Ok(Checkpoint::open_on(pg, dir)?.load_model(model, options)?.1)
    })
}

#[test]
fn all_differences_are_listed_together_on_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    for result in load_changed(dir.path(), &LoadOptions::new()) {
        let error = result.unwrap_err();
        let DcpError::Mismatch(report) = error.cause() else {
            panic!("{error}")
        };
        assert_eq!(report.missing, ["extra.weight"]);
        assert_eq!(
            report.unexpected,
            ["layers.1.fc.bias", "layers.1.fc.weight", "layers.1.scale"]
        );
        let names: Vec<_> = report
            .mismatched
            .iter()
            .map(|(name, ..)| name.as_str())
            .collect();
        assert_eq!(names, ["layers.0.fc.bias", "layers.0.fc.weight"]);
        let text = error.to_string();
        for part in ["extra.weight", "layers.1.scale", "F32 [4, 5]", "F32 [4, 4]"] {
            assert!(text.contains(part), "{text}");
        }
    }
}

#[test]
fn a_partial_load_takes_what_fits_and_reports_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    for result in load_changed(dir.path(), &LoadOptions::new().with_partial(true)) {
        let report = result.unwrap();
        assert_eq!(
            report.loaded,
            ["counts", "emb.weight", "head", "layers.0.scale", "mask"]
        );
        assert_eq!(report.missing, ["extra.weight"]);
    }
}

#[test]
fn what_is_ignored_is_left_alone_and_is_no_difference() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let options = LoadOptions::new().with_ignore(r"^layers\.|^extra").unwrap();
    for result in load_changed(dir.path(), &options) {
        let report = result.unwrap();
        assert!(report.is_exact());
        assert!(report.ignored.contains(&"extra.weight".to_string()));
    }
}

/// A model of one matrix under another name than in a checkpoint of [`Net`], in another dtype.
#[derive(Module, Debug)]
struct Renamed {
    table: Param<Tensor<2>>,
}

#[test]
fn names_are_rewritten_and_floats_cast_on_demand_only() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let model = || {
        let options = (&Device::flex(), burn::tensor::DType::BF16);
        Renamed {
            table: Param::from_tensor(Tensor::zeros([7, 4], options)),
        }
    };
    let renamed = LoadOptions::new()
        .with_rename("^emb.weight$", "table")
        .unwrap();
    let renamed = renamed.with_ignore("^(layers|mask|counts|head)").unwrap();
    let error = checkpoint.load_dense_model(model(), &renamed).unwrap_err();
    assert!(error.to_string().contains("BF16 [7, 4]"), "{error}");

    let (model, report) = checkpoint
        .load_dense_model(model(), &renamed.with_cast(true))
        .unwrap();
    assert_eq!(
        report.cast,
        [("table".to_string(), "F32".to_string(), "BF16".to_string())]
    );
    let net = checkpoint
        .load_dense_model(Net::new(4, &Device::flex()), &LoadOptions::new())
        .unwrap()
        .0;
    let want = net
        .emb
        .weight
        .val()
        .cast(burn::tensor::DType::BF16)
        .into_data();
    model.table.val().into_data().assert_eq(&want, true);
}

#[test]
fn two_names_renamed_to_one_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let options = LoadOptions::new()
        .with_rename(r"layers\.\d", "layer")
        .unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let error = checkpoint
        .load_dense_model(Net::new(4, &device()), &options)
        .unwrap_err();
    assert!(
        error.to_string().contains("renamed to the same name"),
        "{error}"
    );
    assert!(LoadOptions::new().with_ignore("(").is_err());
}

#[test]
fn a_dense_model_and_its_optimizer_load_what_ranks_saved() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let options = LoadOptions::new();
    let (model, _) =
        load_dense_model_from(&checkpoint, "model.", Net::new(4, &device()), &options).unwrap();
    let (optim, _) = checkpoint
        .load_dense_optimizer(adamw(), &model, &options)
        .unwrap();
    let again = dir.path().join("again");
    ranks_ok(1, |pg| {
        let snapshot = Snapshot::new(1)
            .dense_model(&model)
            .dense_optimizer(&optim, &model)?;
        save(pg, &again, snapshot)
    });
    assert_eq!(
        contents(&checkpoint),
        contents(&Checkpoint::open(&again).unwrap())
    );
}

#[test]
fn an_optimizer_of_another_kind_does_not_take_the_state_in_silence() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    for result in ranks(2, |pg| {
        let model = Trained::new(pg, 4, &FsdpConfig::new())?.model;
        let other = burn::optim::LionConfig::new().init();
        let checkpoint = Checkpoint::open_on(pg, dir.path())?;
        checkpoint
            .load_optimizer(other, &model, &LoadOptions::new())
            .map(drop)
    }) {
        let error = result.unwrap_err();
        assert!(
            matches!(error.cause(), DcpError::BadState { .. }),
            "{error}"
        );
        assert!(error.to_string().contains("another kind"), "{error}");
    }
}

#[test]
fn every_optimizer_that_fits_shards_goes_on_as_if_nothing_had_been() {
    use burn::optim::momentum::MomentumConfig;
    use burn::optim::{
        AdaGradConfig, AdamConfig, AdanConfig, LionConfig, RmsPropConfig, SgdConfig,
    };
    type Init = fn() -> ModuleOptimizer;
    let optimizers: [(&str, Init); 7] = [
        ("Adam", || AdamConfig::new().init()),
        ("AdamW", adamw),
        ("AdaGrad", || AdaGradConfig::new().init()),
        ("Adan", || AdanConfig::new().init()),
        ("Lion", || LionConfig::new().init()),
        ("RMSProp", || RmsPropConfig::new().init()),
        ("SGD", || {
            SgdConfig::new()
                .with_momentum(Some(MomentumConfig::new()))
                .init()
        }),
    ];
    for (name, optim) in optimizers {
        let dir = tempfile::tempdir().unwrap();
        ranks_ok(2, |pg| {
            let start = Trained {
                optim: optim(),
                ..Trained::new(pg, 5, &FsdpConfig::new())?
            };
            let trained = start.train(0..2)?;
            save(pg, dir.path(), trained.snapshot(2))?;
            let want = trained.train(2..4)?.whole()?;

            let checkpoint = Checkpoint::open_on(pg, dir.path())?;
            let model = Trained::new(pg, 5, &FsdpConfig::new())?.model;
            let (model, _) = checkpoint.load_model(model, &LoadOptions::new())?;
            let (optim, _) = checkpoint.load_optimizer(optim(), &model, &LoadOptions::new())?;
            let got = Trained { model, optim }.train(2..4)?.whole()?;
            assert_eq!(got, want, "{name}");
            Ok(())
        });
    }
}
