//! What `srun` sets.

use super::{LOCAL_ADDR, LOCAL_PORT, Launcher, Seat, Vars, check_local_size, check_rank};
use crate::{FsdpError, Result};

/// Ports of jobs, below those that Linux gives to connections.
const PORTS: std::ops::Range<u64> = 20_000..30_000;

/// This process's place in a step. `None` in a shell of `salloc`, and in a batch script for one task.
pub(super) fn seat(vars: &Vars<'_>) -> Result<Option<Seat>> {
    if vars.text("SLURM_PROCID")?.is_none() {
        return Ok(None);
    }
    let sizes = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"];
    let size_name = vars.first_of(&sizes)?.map_or(sizes[1], |(name, _)| name);
    let Some(step) = vars.number("SLURM_STEP_ID")? else {
        return match vars.number::<usize>(size_name)? {
            None | Some(1) => Ok(None),
            Some(tasks) => Err(FsdpError::argument(format!(
                "{size_name} is {tasks}, but SLURM_STEP_ID is not set: this is the batch script, of \
                 which there is one; start the program with srun"
            ))),
        };
    };
    let world_size = vars.needed(size_name, "SLURM_PROCID")?;
    let rank = vars.needed("SLURM_PROCID", size_name)?;
    check_rank(("SLURM_PROCID", rank), (size_name, world_size))?;
    let (local_size_name, local_world_size) = tasks_on_this_node(vars, world_size)?;
    check_local_size(local_size_name, local_world_size, world_size)?;
    let local_rank = vars.needed("SLURM_LOCALID", "SLURM_PROCID")?;
    check_rank(
        ("SLURM_LOCALID", local_rank),
        (local_size_name, local_world_size),
    )?;
    let is_local = local_world_size == world_size;
    let host = first_host(vars, &["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"])?;
    let job = vars.text("SLURM_JOB_ID")?.unwrap_or_default();
    Ok(Some(Seat {
        launcher: Launcher::Slurm,
        rank,
        world_size,
        local_rank,
        local_world_size,
        master_addr: host.or_else(|| is_local.then(|| LOCAL_ADDR.to_string())),
        master_port: port(vars, step)?.or_else(|| is_local.then_some(LOCAL_PORT)),
        job: format!("{job}.{step}"),
    }))
}

/// How many tasks of the step are on this node, and what says so.
fn tasks_on_this_node(vars: &Vars<'_>, world_size: usize) -> Result<(&'static str, usize)> {
    let lists = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    if let Some((name, list)) = vars.first_of(&lists)? {
        let node = vars.needed("SLURM_NODEID", name)?;
        let tasks = tasks_on_node(&list, node).ok_or_else(|| {
            FsdpError::argument(format!(
                "{name} is \"{list}\", which tells no number of tasks for node {node} (SLURM_NODEID)"
            ))
        })?;
        return Ok((name, tasks));
    }
    // What was asked for; a node may have fewer, and a small step has.
    let name = "SLURM_NTASKS_PER_NODE";
    match vars.number::<usize>(name)? {
        Some(most) => Ok((name, most.min(world_size))),
        None => Err(FsdpError::argument(format!(
            "SLURM_PROCID is set, but none of {}, {} and {name} is",
            lists[0], lists[1]
        ))),
    }
}

/// The entry for the node in a list such as `4(x2),3`.
fn tasks_on_node(list: &str, node: usize) -> Option<usize> {
    let mut nodes_so_far = 0usize;
    for entry in list.split(',') {
        let (tasks, nodes) = match entry.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1),
        };
        nodes_so_far = nodes_so_far.checked_add(nodes)?;
        if node < nodes_so_far {
            return tasks.parse().ok();
        }
    }
    None
}

/// The first host of the first of these node lists that is set.
pub(super) fn first_host(vars: &Vars<'_>, names: &[&'static str]) -> Result<Option<String>> {
    let Some((name, list)) = vars.first_of(names)? else {
        return Ok(None);
    };
    let no_list =
        || FsdpError::argument(format!("{name} is \"{list}\", which is no list of nodes"));
    first_of(&list).map(Some).ok_or_else(no_list)
}

/// The first name of a list such as `node[01-03,07]-ib,other`, which is `node01-ib`.
fn first_of(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    while let Some(at) = rest.find(['[', ']', ',']) {
        host.push_str(&rest[..at]);
        match &rest[at..=at] {
            "[" => {
                let (numbers, after) = rest[at + 1..].split_once(']')?;
                let first = numbers.split([',', '-']).next()?;
                if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
                    return None;
                }
                host.push_str(first);
                rest = after;
            }
            "," => {
                rest = "";
                break;
            }
            _ => return None,
        }
    }
    host.push_str(rest);
    (!host.is_empty()).then_some(host)
}

/// A port that all ranks of a step agree on, and other jobs and steps most likely don't.
pub(super) fn port(vars: &Vars<'_>, step: u64) -> Result<Option<u16>> {
    let Some(job) = vars.number::<u64>("SLURM_JOB_ID")? else {
        return Ok(None);
    };
    // Steps lie far apart, out of the way of the jobs that follow.
    let offset = job.wrapping_add(step.wrapping_mul(997)) % (PORTS.end - PORTS.start);
    Ok(u16::try_from(PORTS.start + offset).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::env::JobEnv;

    #[test]
    fn the_first_host_of_a_node_list_is_found() {
        for (list, first) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("node[01-03,07],other", "node01"),
            ("node[7,9-12]", "node7"),
            ("gpu-a[100-101]", "gpu-a100"),
            ("node[1-4]-ib", "node1-ib"),
            ("rack[2-3]node[05,07],x", "rack2node05"),
            ("login,node[1-2]", "login"),
            ("n1.cluster.local", "n1.cluster.local"),
        ] {
            assert_eq!(first_of(list).as_deref(), Some(first), "{list}");
        }
    }

    #[test]
    fn what_is_no_node_list_has_no_first_host() {
        for list in [
            "",
            ",node1",
            "node[",
            "node[1-2",
            "node1]",
            "node[]",
            "node[a-b]",
            "node[-2]",
        ] {
            assert_eq!(first_of(list), None, "{list}");
        }
    }

    #[test]
    fn tasks_of_a_node_are_found_in_the_list() {
        for (list, tasks) in [
            ("4", vec![4]),
            ("4(x2)", vec![4, 4]),
            ("4(x2),3", vec![4, 4, 3]),
            ("1,2(x1),8", vec![1, 2, 8]),
        ] {
            for (node, tasks) in tasks.iter().enumerate() {
                assert_eq!(tasks_on_node(list, node), Some(*tasks), "{list} {node}");
            }
            assert_eq!(tasks_on_node(list, tasks.len()), None, "{list}");
        }
        for list in ["", "x", "4(x", "4(x)", "4(xa)", "(x2)"] {
            assert_eq!(tasks_on_node(list, 0), None, "{list}");
        }
    }

    fn read(vars: &[(&str, &str)]) -> Result<Option<JobEnv>> {
        JobEnv::from_vars(|name| {
            let var = vars.iter().rfind(|(other, _)| *other == name);
            var.map(|(_, value)| (*value).to_string())
        })
    }

    /// The second task of the second of two nodes.
    const TASK: [(&str, &str); 8] = [
        ("SLURM_JOB_ID", "4711"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "6"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NODEID", "1"),
        ("SLURM_TASKS_PER_NODE", "4,2"),
        ("SLURM_JOB_NODELIST", "node[08-09]"),
    ];

    fn task_with(more: &[(&'static str, &'static str)]) -> Result<Option<JobEnv>> {
        read(&[&TASK[..], more].concat())
    }

    fn task_without(name: &str) -> Result<Option<JobEnv>> {
        let vars = TASK.into_iter().filter(|(other, _)| *other != name);
        read(&vars.collect::<Vec<_>>())
    }

    #[test]
    fn a_task_of_srun_is_a_rank() {
        let env = read(&TASK).unwrap().unwrap();
        assert_eq!((env.rank, env.world_size), (5, 6));
        assert_eq!((env.local_rank, env.local_world_size), (1, 2));
        assert_eq!(env.launcher, Launcher::Slurm);
        assert_eq!(
            (env.master_addr.as_str(), env.master_port),
            ("node08", 24_711)
        );
        assert_eq!(env.secret, "job 4711.0 at port 24711");
    }

    #[test]
    fn what_is_said_of_the_step_goes_before_what_is_said_of_the_job() {
        let env = task_with(&[
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_STEP_TASKS_PER_NODE", "2"),
            ("SLURM_NODEID", "0"),
            ("SLURM_STEP_NODELIST", "node09"),
        ]);
        let env = env.unwrap().unwrap();
        assert_eq!((env.rank, env.world_size, env.local_world_size), (1, 2, 2));
        assert_eq!(env.master_addr, "node09");
    }

    #[test]
    fn the_users_address_goes_before_that_of_the_node_list() {
        let env = task_with(&[("MASTER_ADDR", "node08-ib"), ("MASTER_PORT", "1234")]);
        let env = env.unwrap().unwrap();
        assert_eq!(
            (env.master_addr.as_str(), env.master_port),
            ("node08-ib", 1234)
        );
    }

    #[test]
    fn ports_of_jobs_and_steps_are_in_the_range_and_differ() {
        let port_of = |job: &str, step: &str| {
            let env = task_with(&[
                ("SLURM_JOB_ID", job.to_string().leak()),
                ("SLURM_STEP_ID", step.to_string().leak()),
            ]);
            env.unwrap().unwrap().master_port
        };
        let ports = [
            ("1", "0"),
            ("2", "0"),
            ("1", "1"),
            ("9999", "3"),
            ("18446744073709551615", "7"),
        ]
        .map(|(job, step)| port_of(job, step));
        for (i, port) in ports.iter().enumerate() {
            assert!(PORTS.contains(&u64::from(*port)), "{port}");
            assert!(!ports[..i].contains(port), "{ports:?}");
        }
    }

    #[test]
    fn without_a_node_list_a_step_on_one_node_is_local() {
        let vars = [
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NTASKS_PER_NODE", "4"),
        ];
        let env = read(&vars).unwrap().unwrap();
        assert_eq!((env.local_world_size, env.master_port), (2, LOCAL_PORT));
        assert_eq!(env.master_addr, LOCAL_ADDR);
    }

    #[test]
    fn shells_and_scripts_of_a_job_are_no_ranks() {
        let salloc = [
            ("SLURM_JOB_ID", "1"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_JOB_NODELIST", "n[1-4]"),
        ];
        assert!(read(&salloc).unwrap().is_none());
        let script = [
            ("SLURM_JOB_ID", "1"),
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
        ];
        assert!(read(&script).unwrap().is_none());
        let script = [("SLURM_JOB_ID", "1"), ("SLURM_PROCID", "0")];
        assert!(read(&script).unwrap().is_none());
    }

    #[test]
    fn what_makes_no_sense_is_named_with_its_value() {
        for (more, words) in [
            (
                ("SLURM_PROCID", "6"),
                ["SLURM_PROCID is 6", "SLURM_NTASKS is 6"],
            ),
            (("SLURM_NTASKS", "0"), ["SLURM_NTASKS is 0", "one rank"]),
            (("SLURM_NTASKS", "many"), ["SLURM_NTASKS", "\"many\""]),
            (
                ("SLURM_LOCALID", "2"),
                ["SLURM_LOCALID is 2", "SLURM_TASKS_PER_NODE is 2"],
            ),
            (
                ("SLURM_TASKS_PER_NODE", "4,7"),
                ["SLURM_TASKS_PER_NODE gives 7", "6 in all"],
            ),
            (
                ("SLURM_TASKS_PER_NODE", "4,0"),
                ["SLURM_TASKS_PER_NODE gives 0", "6 in all"],
            ),
            (
                ("SLURM_TASKS_PER_NODE", "4"),
                ["SLURM_TASKS_PER_NODE", "node 1"],
            ),
            (
                ("SLURM_JOB_NODELIST", "node["),
                ["SLURM_JOB_NODELIST", "\"node[\""],
            ),
            (("SLURM_JOB_ID", "-1"), ["SLURM_JOB_ID", "\"-1\""]),
            (("SLURM_STEP_ID", "x"), ["SLURM_STEP_ID", "\"x\""]),
        ] {
            let error = task_with(&[more]).unwrap_err().to_string();
            assert!(
                words.iter().all(|word| error.contains(word)),
                "{more:?}: {error}"
            );
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        for (without, word) in [
            ("SLURM_NTASKS", "SLURM_NTASKS is not"),
            ("SLURM_LOCALID", "SLURM_LOCALID is not"),
            ("SLURM_NODEID", "SLURM_NODEID is not"),
            ("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
            ("SLURM_STEP_ID", "start the program with srun"),
            ("SLURM_JOB_NODELIST", "MASTER_ADDR is not set"),
            ("SLURM_JOB_ID", "MASTER_PORT is not set"),
        ] {
            let error = task_without(without).unwrap_err().to_string();
            assert!(error.contains(word), "{without}: {error}");
        }
    }
}
