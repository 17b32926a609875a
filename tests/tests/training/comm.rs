use std::time::Duration;

use burn::prelude::*;
use burn_fsdp::{FsdpError, LaunchConfig, ProcessGroup, ReduceOp, launch};

fn tensor(values: &[f32]) -> Tensor<1> {
    Tensor::from_floats(values, &Device::flex())
}

fn values(tensor: Tensor<1>) -> Vec<f32> {
    tensor.try_into_vec_as::<f32>().unwrap()
}

#[test]
fn launch_returns_every_ranks_value_in_rank_order() {
    let got = launch(4, |pg| {
        std::thread::sleep(Duration::from_millis(10 * (4 - pg.rank() as u64)));
        Ok((pg.rank(), pg.world_size()))
    });
    assert_eq!(got.unwrap(), vec![(0, 4), (1, 4), (2, 4), (3, 4)]);
}

#[test]
fn all_gather_concatenates_in_rank_order() {
    for world in 1..=5 {
        let got = launch(world, |pg| {
            let r = pg.rank() as f32;
            Ok(values(pg.all_gather(tensor(&[r, r + 0.5]))?))
        })
        .unwrap();
        let want: Vec<f32> = (0..world)
            .flat_map(|r| [r as f32, r as f32 + 0.5])
            .collect();
        assert!(got.iter().all(|g| g == &want), "{got:?}");
    }
}

#[test]
fn reduce_scatter_gives_each_rank_its_part_of_the_sum_mean_max_and_min() {
    let world = 3;
    for (op, want) in [
        (ReduceOp::Sum, [60.0, 63.0, 66.0]),
        (ReduceOp::Mean, [20.0, 21.0, 22.0]),
        (ReduceOp::Max, [30.0, 31.0, 32.0]),
        (ReduceOp::Min, [10.0, 11.0, 12.0]),
    ] {
        let got = launch(world, |pg| {
            let r = 10.0 * (pg.rank() as f32 + 1.0);
            Ok(values(
                pg.reduce_scatter(tensor(&[r, r + 1.0, r + 2.0]), op)?,
            ))
        })
        .unwrap();
        assert_eq!(got, want.map(|x| vec![x]), "{op:?}");
    }
}

#[test]
fn all_reduce_gives_every_rank_the_whole() {
    for (op, want) in [
        (ReduceOp::Sum, 6.0),
        (ReduceOp::Mean, 2.0),
        (ReduceOp::Max, 3.0),
        (ReduceOp::Min, 1.0),
    ] {
        let got = launch(3, |pg| {
            Ok(values(
                pg.all_reduce(tensor(&[pg.rank() as f32 + 1.0, 0.0]), op)?,
            ))
        })
        .unwrap();
        assert!(got.iter().all(|g| g == &[want, 0.0]), "{op:?}: {got:?}");
    }
}

#[test]
fn broadcast_takes_the_roots_tensor() {
    let got = launch(3, |pg| {
        Ok(values(pg.broadcast(tensor(&[pg.rank() as f32; 2]), 2)?))
    })
    .unwrap();
    assert!(got.iter().all(|g| g == &[2.0, 2.0]), "{got:?}");
}

#[test]
fn bytes_of_unequal_length_are_gathered_and_broadcast() {
    let got = launch(3, |pg| {
        let all = pg.all_gather_bytes(vec![pg.rank() as u8; pg.rank()])?;
        let one = pg.broadcast_bytes(
            1,
            if pg.rank() == 1 {
                b"hello".to_vec()
            } else {
                vec![]
            },
        )?;
        Ok((all, one))
    })
    .unwrap();
    for (all, one) in got {
        assert_eq!(all, vec![vec![], vec![1], vec![2, 2]]);
        assert_eq!(one, b"hello");
    }
}

#[test]
fn a_thousand_collectives_in_a_row_keep_their_order() {
    let got = launch(4, |pg| {
        let mut sum = 0.0;
        for i in 0..1000 {
            let x = pg.all_reduce(tensor(&[(i * (pg.rank() + 1)) as f32]), ReduceOp::Sum)?;
            sum += f64::from(values(x)[0]);
        }
        Ok(sum)
    })
    .unwrap();
    assert!(got.iter().all(|x| *x == 10.0 * 999.0 * 500.0), "{got:?}");
}

#[test]
fn a_sum_is_bit_equal_from_run_to_run_and_on_all_ranks() {
    let run = || {
        launch(5, |pg| {
            let x: Vec<f32> = (0..1000)
                .map(|i| ((i * 7 + pg.rank() * 13) as f32).sin() * 1e3)
                .collect();
            let sum = values(pg.all_reduce(tensor(&x), ReduceOp::Sum)?);
            Ok(sum.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        })
        .unwrap()
    };
    let (a, b) = (run(), run());
    assert_eq!(a, b);
    assert!(a.iter().all(|x| x == &a[0]));
}

#[test]
fn counts_tell_what_was_called() {
    launch(2, |pg| {
        let before = pg.counts();
        pg.all_gather(tensor(&[1.0]))?;
        pg.all_gather(tensor(&[1.0]))?;
        pg.reduce_scatter(tensor(&[1.0, 2.0]), ReduceOp::Sum)?;
        let after = pg.counts();
        assert_eq!(after.all_gathers - before.all_gathers, 2);
        assert_eq!(after.reduce_scatters - before.reduce_scatters, 1);
        assert_eq!(after.all_reduces, before.all_reduces);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_rank_runs_on_its_share_of_threads() {
    let got = LaunchConfig::new(2)
        .with_threads_per_rank(3)
        .launch(|_pg: ProcessGroup| {
            let x = Tensor::<2>::ones([256, 256], &Device::flex());
            Ok(x.clone().matmul(x).sum().into_scalar::<f32>())
        })
        .unwrap();
    assert_eq!(got, vec![256.0 * 256.0 * 256.0; 2]);
}

#[test]
fn a_reduce_scatter_that_does_not_divide_is_refused() {
    let error = launch(2, |pg| {
        pg.reduce_scatter(tensor(&[1.0, 2.0, 3.0]), ReduceOp::Sum)
            .map(values)
    });
    let text = error.unwrap_err().to_string();
    assert!(text.contains('3') && text.contains('2'), "{text}");
}

#[test]
fn a_broadcast_from_a_rank_that_does_not_exist_is_refused() {
    let error = launch(2, |pg| pg.broadcast(tensor(&[1.0]), 2).map(values)).unwrap_err();
    assert!(error.to_string().contains('2'), "{error}");
}

#[test]
fn a_world_of_no_ranks_is_refused() {
    let error = launch(0, |_| Ok(())).unwrap_err();
    assert!(matches!(error, FsdpError::InvalidArgument(_)), "{error:?}");
}
