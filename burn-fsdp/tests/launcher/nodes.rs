//! Jobs of several nodes, here on one machine.

use super::{Running, burn_fsdp, run};

const NODE: &str = "--nproc 2 --nnodes 2 --master-addr localhost --master-port 4321";
const TELL: &str = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT \
                    ${BURN_FSDP_SECRET-none}";

#[test]
fn two_launchers_make_one_job() {
    let launchers = [0, 1].map(|node| {
        let mut command = burn_fsdp(&format!("run {NODE} --node-rank {node} -- sh -c"));
        command.arg(TELL).env("BURN_FSDP_SECRET", "hush");
        Running::start(&mut command)
    });
    let [first, second] = launchers.map(Running::end);
    assert_eq!(
        first.ok(),
        [
            "[0] 0 4 0 2 localhost:4321 hush",
            "[1] 1 4 1 2 localhost:4321 hush"
        ]
    );
    assert_eq!(
        second.ok(),
        [
            "[2] 2 4 0 2 localhost:4321 hush",
            "[3] 3 4 1 2 localhost:4321 hush"
        ]
    );
}

#[test]
fn without_a_secret_the_launcher_warns_and_ranks_make_their_own() {
    let ran = run(&format!("{NODE} --node-rank 1"), TELL);
    assert_eq!(ran.status.code(), Some(0));
    assert!(
        ran.err.starts_with("burn-fsdp: warning: no secret"),
        "{}",
        ran.err
    );
    assert!(
        ran.out.contains("[2] 2 4 0 2 localhost:4321 none\n"),
        "{}",
        ran.out
    );
}

#[test]
fn a_failing_rank_is_named_by_its_number_in_the_job() {
    let ran = run(&format!("{NODE} --node-rank 1"), "exit $LOCAL_RANK");
    ran.fails(1, &["rank 3 ", "exit code 1"]);
}
