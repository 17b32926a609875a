//! Commands that look into checkpoints.

use super::*;

// ---- inspect

#[test]
fn inspect_prints_the_tree_of_names() {
    let fixture = Fixture::new();
    let out = tool!("inspect", fixture.checkpoint).ok();
    for words in [
        "step 2, by 2 ranks",
        "metric loss = 0.5",
        "F32 [5, 7]  140 B",
        "I32 [3]  12 B",
        "words  ",
        "place of rank 1  ",
    ] {
        assert!(out.contains(words), "{words} in {out}");
    }
    let layers = out.find("\n  layers").unwrap();
    assert!(layers > out.find("\n  counts").unwrap(), "{out}");
    assert!(!out.contains("shard-"), "{out}");
}

#[test]
fn inspect_prints_where_the_parts_of_tensors_are() {
    let fixture = Fixture::new();
    let out = tool!("inspect", fixture.checkpoint, "--files").ok();
    assert!(
        out.contains("rank 1: [2, 7] at [3, 0], 56 B from byte "),
        "{out}"
    );
    let out = tool!(
        "inspect",
        fixture.checkpoint,
        "--tensor",
        "model.layers.1.weight"
    )
    .ok();
    assert_eq!(out.lines().count(), 3, "{out}");
    assert!(
        out.contains("rank 0: [3, 7] at [0, 0]") && out.contains(".safetensors"),
        "{out}"
    );
}

#[test]
fn inspect_prints_one_json_document() {
    let fixture = Fixture::new();
    let out = tool!("inspect", fixture.checkpoint, "--json", "--files").ok();
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["format"], "burn");
    assert_eq!((&json["step"], &json["world_size"]), (&2.into(), &2.into()));
    assert_eq!(json["metrics"]["loss"], 0.5);
    let checkpoint = Checkpoint::open(&fixture.checkpoint).unwrap();
    let tensors = json["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), checkpoint.tensors().len());
    let weight = tensors
        .iter()
        .find(|t| t["name"] == "model.layers.0.weight")
        .unwrap();
    assert_eq!(weight["shape"], serde_json::json!([5, 7]));
    assert_eq!(weight["chunks"][1]["offsets"], serde_json::json!([3, 0]));
    assert_eq!(
        json["states"].as_array().unwrap().len(),
        { checkpoint.manifest().states.values() }.flatten().count()
    );
    assert_eq!(json["files"].as_array().unwrap().len(), 2);
}

#[test]
fn an_unknown_tensor_brings_the_nearest_names() {
    let fixture = Fixture::new();
    tool!(
        "inspect",
        fixture.checkpoint,
        "--tensor",
        "model.layer.1.weight"
    )
    .fails(&["has no tensor", "did you mean", "\"model.layers.1.weight\""]);
}

// ---- what is no checkpoint

#[test]
fn what_is_no_checkpoint_is_told_in_one_line() {
    let fixture = Fixture::new();
    let (missing, file) = (fixture.path("missing"), fixture.path("notes.txt"));
    fs::write(&file, "notes").unwrap();
    for command in ["inspect", "verify"] {
        tool!(command, missing).fails(&[
            "missing is not a checkpoint",
            "there is nothing of that name",
        ]);
        tool!(command, file).fails(&["notes.txt is not a checkpoint", "file of another kind"]);
    }
    tool!("inspect", fixture.dir.path()).fails(&["step-2 is that of step 2"]);
    tool!("diff", fixture.checkpoint, missing).fails(&["missing is not a checkpoint"]);
    fs::rename(fixture.checkpoint.join("manifest"), fixture.path("gone")).unwrap();
    tool!("inspect", fixture.checkpoint).fails(&["a save was cut short"]);
}

#[test]
fn wrong_usage_is_told_in_one_line() {
    tool!("inspect").fails(&["required", "<PATH>", "--help"]);
    tool!("inspct").fails(&["unrecognized subcommand", "inspect"]);
    run_tool([]).fails(&["no command"]);
    assert!(tool!("--help").ok().contains("reshard"));
    assert!(tool!("convert", "--help").ok().contains("transposed"));
}

#[test]
fn a_truncated_manifest_is_told() {
    let fixture = Fixture::new();
    let manifest = fixture.checkpoint.join("manifest");
    let bytes = fs::read(&manifest).unwrap();
    for len in [0, 7, 30, bytes.len() - 1] {
        fs::write(&manifest, &bytes[..len]).unwrap();
        tool!("inspect", fixture.checkpoint).fails(&["manifest is damaged", "restore it"]);
        let Ran(code, out, _) = tool!("verify", fixture.checkpoint);
        assert!(code == 1 && out.contains("step-2: bad: "), "{out}");
    }
}

#[cfg(unix)]
#[test]
fn a_reader_that_leaves_is_no_fault() {
    let fixture = Fixture::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_burn-dcp"))
        .args([Path::new("inspect"), &fixture.checkpoint])
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(
        (output.status.code(), &*output.stderr),
        (Some(141), &b""[..])
    );
}

// ---- verify

#[test]
fn verify_finds_a_flipped_byte_among_the_checkpoints_of_a_run() {
    let fixture = Fixture::new();
    save(&fixture.path("step-10"), 1, 10, 0.25);
    let out = tool!("verify", fixture.dir.path()).ok();
    let steps: Vec<_> = out.lines().map(|l| l.rsplit('/').next().unwrap()).collect();
    assert_eq!(steps, ["step-2: good", "step-10: good"]);

    flip_byte_of(&fixture.shard());
    let Ran(code, out, err) = tool!("verify", fixture.dir.path());
    assert_eq!((code, err.as_str()), (1, ""));
    assert!(
        out.contains("step-2: bad: ") && out.contains("fails its checksum"),
        "{out}"
    );
    assert!(out.contains("step-10: good"), "{out}");
}

#[test]
fn verify_finds_a_missing_file() {
    let fixture = Fixture::new();
    fs::remove_file(fixture.shard()).unwrap();
    let Ran(code, out, _) = tool!("verify", fixture.checkpoint);
    assert!(code == 1 && out.contains("is missing"), "{out}");
}

// ---- diff

#[test]
fn diff_tells_equal_from_different() {
    let fixture = Fixture::new();
    let (a, b) = (&fixture.checkpoint, fixture.path("step-3"));
    let out = tool!("diff", a, a).ok();
    assert!(out.ends_with("tensors equal, 0 different\n"), "{out}");
    save(&b, 3, 3, 0.5);
    let Ran(code, out, _) = tool!("diff", a, b);
    assert!(
        code == 1 && out.contains("model.layers.0.weight: ") && out.contains("max abs"),
        "{out}"
    );
    assert!(!out.contains("model.counts"), "{out}");
    tool!("diff", a, b, "--atol", "10").ok();
    tool!("diff", a, b, "--rtol", "-1").fails(&["--rtol"]);
    tool!("diff", a, b, "--atol", "NaN").fails(&["--atol NaN"]);
}

#[test]
fn diff_tells_names_and_types_that_differ() {
    let fixture = Fixture::new();
    let (a, b) = (&fixture.checkpoint, fixture.path("b.safetensors"));
    tool!(
        "merge",
        a,
        b,
        "--filter",
        "layers",
        "--dtype",
        "bf16",
        "--rename",
        "0.bias=2.bias"
    )
    .ok();
    let Ran(code, out, _) = tool!("diff", a, b, "--rtol", "0.01");
    assert_eq!(code, 1);
    for words in [
        "model.counts: only in A, I32 [3]",
        "model.layers.2.bias: only in B, BF16 [7]",
        "model.layers.0.weight: type F32 in A, BF16 in B\n",
    ] {
        assert!(out.contains(words), "{words} in {out}");
    }
}
