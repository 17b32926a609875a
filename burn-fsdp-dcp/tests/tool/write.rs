//! Commands that write checkpoints, and remove them.

use super::*;

// ---- merge and convert

#[test]
fn merge_writes_a_file_that_safetensors_reads() {
    let fixture = Fixture::new();
    let merged = fixture.path("all.safetensors");
    tool!("merge", fixture.checkpoint, merged).ok();
    let bytes = fs::read(&merged).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let expected = contents_of(&fixture.checkpoint);
    assert_eq!(read.len(), expected.len());
    for (name, _, bytes) in expected {
        assert_eq!(read.tensor(&name).unwrap().data(), bytes, "{name}");
    }
    tool!("merge", fixture.checkpoint, merged).fails(&["already", "--overwrite"]);
    tool!("merge", fixture.checkpoint, merged, "--overwrite").ok();
    tool!("merge", fixture.checkpoint, fixture.dir.path()).fails(&["is a directory"]);
    tool!("merge", fixture.checkpoint, fixture.path("x.bin")).fails(&[".safetensors"]);
}

#[test]
fn tensors_come_back_from_every_format() {
    let fixture = Fixture::new();
    let mut last = fixture.checkpoint.clone();
    for (i, to) in ["torch", "hf", "burn", "hf", "torch", "burn"]
        .into_iter()
        .enumerate()
    {
        let next = fixture.path(&format!("{i}-{to}"));
        tool!("convert", last, next, "--to", to).ok();
        let out = tool!("diff", fixture.checkpoint, next).ok();
        assert!(out.contains(" 0 different"), "{out}");
        tool!("inspect", next, "--files").ok();
        tool!("convert", last, next, "--to", to).fails(&["already", "--overwrite"]);
        tool!("convert", last, next, "--to", to, "--overwrite").ok();
        tool!("diff", fixture.checkpoint, next).ok();
        last = next;
    }
    tool!("verify", last).ok();
}

#[test]
fn converting_chooses_renames_and_casts() {
    let fixture = Fixture::new();
    let target = fixture.path("weights");
    let (filter, rename) = ("^model.*(weight|counts)$", r"^model\.(.*)=net.$1");
    let words = [
        "--filter", filter, "--rename", rename, "--rename", "layers=l", "--dtype", "bf16",
    ];
    let args = [
        "convert".as_ref(),
        fixture.checkpoint.as_path(),
        &target,
        "--to".as_ref(),
        "burn".as_ref(),
    ];
    run_tool(args.into_iter().chain(words.iter().map(Path::new))).ok();
    let checkpoint = Checkpoint::open(&target).unwrap();
    let names: Vec<_> = checkpoint.tensors().keys().collect();
    assert_eq!(names, ["net.counts", "net.l.0.weight", "net.l.1.weight"]);
    assert_eq!(
        checkpoint.tensors()["net.l.0.weight"].dtype,
        burn::tensor::DType::BF16
    );
    assert_eq!(
        (checkpoint.step(), checkpoint.manifest().world_size),
        (2, 1)
    );
    assert_eq!(
        checkpoint.state::<Vec<String>>("words").unwrap(),
        ["a", "b"]
    );
}

#[test]
fn conversions_that_make_no_sense_are_told() {
    let fixture = Fixture::new();
    let (from, to) = (&fixture.checkpoint, fixture.path("to"));
    tool!("convert", from, to, "--to", "hf", "--filter", "(").fails(&[
        "--filter",
        "no regular expression",
        "unclosed group",
    ]);
    tool!("convert", from, to, "--to", "hf", "--rename", "a").fails(&["REGEX=REPLACEMENT"]);
    tool!("convert", from, to, "--to", "hf", "--filter", "zzz")
        .fails(&["--filter finds no tensor"]);
    tool!("convert", from, to, "--to", "hf", "--rename", ".*=x")
        .fails(&["--rename makes \"x\" of both"]);
    tool!("convert", from, to, "--to", "onnx").fails(&["invalid value", "burn, torch, hf"]);
    tool!("convert", from, to, "--to", "hf", "--from", "torch").fails(&["no file .metadata"]);
    tool!("convert", from, from, "--to", "torch", "--overwrite").fails(&["another place"]);
    assert!(!to.exists());
}

#[test]
fn a_checkpoint_of_pytorch_is_read() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let (torch, whole) = (
        data.join("dcp_torch_w2"),
        data.join("dcp_torch_w2.safetensors"),
    );
    let out = tool!("inspect", torch).ok();
    assert!(
        out.contains("format \"torch\"") && out.contains("optim.param_groups"),
        "{out}"
    );
    let out = tool!("inspect", torch, "--json").ok();
    assert!(serde_json::from_str::<serde_json::Value>(&out).unwrap()["step"].is_null());
    let out = tool!("diff", torch, whole).ok();
    assert!(out.contains(" 0 different"), "{out}");
    tool!("verify", torch).fails(&["not of burn-fsdp-dcp"]);
}

// ---- reshard

#[test]
fn resharding_changes_who_has_what_and_nothing_else() {
    let fixture = Fixture::new();
    let mut last = fixture.checkpoint.clone();
    for world in [3, 1, 5, 2, 64] {
        let next = fixture.path(&format!("w{world}"));
        tool!("reshard", last, next, "--world-size", world.to_string()).ok();
        tool!("verify", next).ok();
        let checkpoint = Checkpoint::open(&next).unwrap();
        assert_eq!(
            contents(&checkpoint),
            contents_of(&fixture.checkpoint),
            "{world}"
        );
        let manifest = checkpoint.manifest();
        assert_eq!((manifest.step, manifest.world_size), (2, world));
        assert_eq!(manifest.metrics["loss"], 0.5);
        assert_eq!(
            checkpoint.state::<Vec<String>>("words").unwrap(),
            ["a", "b"]
        );
        for rank in 0..2 {
            assert_eq!(checkpoint.rank_state("place", rank).unwrap(), Some(rank));
        }
        last = next;
    }
}

#[test]
fn a_resharded_checkpoint_is_laid_out_as_ranks_lay_it_out() {
    let fixture = Fixture::new();
    let (resharded, saved) = (fixture.path("resharded"), fixture.path("saved"));
    tool!(
        "reshard",
        fixture.checkpoint,
        resharded,
        "--world-size",
        "3"
    )
    .ok();
    save(&saved, 3, 2, 0.5);
    let layout = |path: &Path| {
        let checkpoint = Checkpoint::open(path).unwrap();
        let manifest = checkpoint.manifest().clone();
        let tensors = manifest
            .tensors
            .into_iter()
            .filter(|(_, tensor)| tensor.chunks.len() > 1);
        let place = |chunk: burn_fsdp_dcp::ChunkEntry| {
            (
                manifest.files[chunk.extent.file as usize].rank,
                chunk.region,
            )
        };
        tensors
            .map(|(name, tensor)| {
                (
                    name,
                    tensor.chunks.into_iter().map(place).collect::<Vec<_>>(),
                )
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(layout(&resharded), layout(&saved));
}

#[test]
fn resharding_that_fails_leaves_nothing() {
    let fixture = Fixture::new();
    let target = fixture.path("target");
    tool!("reshard", fixture.checkpoint, target, "--world-size", "0").fails(&["not by 0"]);
    tool!("reshard", fixture.checkpoint, target, "--world-size", "x").fails(&["invalid value 'x'"]);
    assert!(!target.exists());
    tool!("reshard", fixture.checkpoint, target, "--world-size", "2").ok();
    tool!("reshard", fixture.checkpoint, target, "--world-size", "3")
        .fails(&["already", "--overwrite"]);
    let before = fs::read_dir(&target).unwrap().count();
    let expected = contents_of(&fixture.checkpoint);
    flip_byte_of(&fixture.shard());
    tool!(
        "reshard",
        fixture.checkpoint,
        target,
        "--world-size",
        "3",
        "--overwrite"
    )
    .fails(&["checksum"]);
    assert_eq!(fs::read_dir(&target).unwrap().count(), before);
    assert_eq!(contents_of(&target), expected);
    // In place.
    tool!(
        "reshard",
        target,
        target,
        "--world-size",
        "4",
        "--overwrite"
    )
    .ok();
    assert_eq!(contents_of(&target), expected);
    assert_eq!(fs::read_dir(&target).unwrap().count(), 5);
}

// ---- prune

#[test]
fn prune_keeps_the_latest_and_the_best() {
    let fixture = Fixture::new();
    for (step, loss) in [(4, 0.1), (6, 0.7), (8, 0.9), (10, 0.8)] {
        save(&fixture.path(&format!("step-{step}")), 1, step, loss);
    }
    let args = ["--keep-latest", "2", "--keep-best", "1:loss:lower"];
    let dir = fixture.dir.path();
    let out = tool!(
        "prune",
        dir,
        args[0],
        args[1],
        args[2],
        args[3],
        "--dry-run"
    )
    .ok();
    assert_eq!(out, "would remove step-2\nwould remove step-6\n");
    assert!(fixture.path("step-2").exists());
    let out = tool!("prune", dir, args[0], args[1], args[2], args[3]).ok();
    assert_eq!(out, "removed step-2\nremoved step-6\n");
    let left = |step| fixture.path(&format!("step-{step}")).exists();
    assert_eq!([2, 4, 6, 8, 10].map(left), [false, true, false, true, true]);
    assert_eq!(
        tool!("prune", dir, args[0], args[1], args[2], args[3]).ok(),
        "nothing to remove\n"
    );
}

#[test]
fn slips_when_pruning_remove_nothing() {
    let fixture = Fixture::new();
    save(&fixture.path("step-4"), 1, 4, 0.1);
    let dir = fixture.dir.path();
    let prune = |best: &str| tool!("prune", dir, "--keep-latest", "1", "--keep-best", best);
    prune("1:lost:lower").fails(&["has a metric \"lost\"", "\"loss\""]);
    prune("1:loss:less").fails(&["2:loss:lower"]);
    prune("loss").fails(&["2:loss:lower"]);
    tool!("prune", dir, "--keep-latest", "0").fails(&["1 at least"]);
    tool!("prune", fixture.checkpoint, "--keep-latest", "1").fails(&["has no checkpoints"]);
    tool!("prune", fixture.path("x"), "--keep-latest", "1").fails(&["cannot read"]);
    assert!(fixture.checkpoint.join("manifest").exists());
}
