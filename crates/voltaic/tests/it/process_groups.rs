//! Operations between ranks in all their forms, and groups of some of the ranks.

use std::process::Command;
use std::time::{Duration, Instant};

use voltaic::accelerator::{HpuEmulator, HpuSettings};
use voltaic::distributed::{ProcessGroup, ReduceOp, Work};
use voltaic::{Device, Kind, Tensor};

use crate::distributed::{as_ranks, as_ranks_with, as_ranks_within, floats};

const CPU: tch::Device = tch::Device::Cpu;

fn filled(rows: i64, value: f64) -> Tensor {
    Tensor::full([rows, 2], value, (Kind::Float, CPU))
}

#[test]
fn every_operation_does_what_pytorch_says() {
    as_ranks(3, |group| {
        let rank = group.rank();
        let own = || Tensor::from_slice(&[rank as f32, 1.0]);
        for (op, expected) in [
            (ReduceOp::Sum, [3.0, 3.0]),
            (ReduceOp::Avg, [1.0, 1.0]),
            (ReduceOp::Max, [2.0, 1.0]),
            (ReduceOp::Product, [0.0, 1.0]),
        ] {
            let tensor = own();
            group.reduce(&tensor, 2, op).unwrap();
            let expected = if rank == 2 { expected.to_vec() } else { floats(&own()) };
            assert_eq!(floats(&tensor), expected, "{op:?}: those of the others stay");
        }
        let product = own() + 1.0;
        group.all_reduce(&product, ReduceOp::Product).unwrap();
        assert_eq!(floats(&product), [6.0, 8.0]);
        let gathered = group.gather(&own(), 1).unwrap();
        assert_eq!(
            gathered.map(|it| (it.size(), floats(&it))),
            (rank == 1).then(|| { (vec![3, 2], vec![0.0, 1.0, 1.0, 1.0, 2.0, 1.0]) })
        );
        let part = Tensor::zeros([2], (Kind::Float, CPU));
        let parts = Tensor::arange(6, (Kind::Float, CPU)).view([3, 2]);
        group.scatter(&part, (rank == 0).then_some(&parts), 0).unwrap();
        assert_eq!(floats(&part), [2.0 * rank as f32, 2.0 * rank as f32 + 1.0]);
        // strided input: a column of each
        let columns =
            (Tensor::arange(6, (Kind::Float, CPU)).view([2, 3]) + 10.0 * rank as f64).transpose(0, 1);
        let exchanged = group.all_to_all(&columns).unwrap();
        let row = |from: usize| [rank, rank + 3].map(|it| (it + 10 * from) as f32);
        assert_eq!(floats(&exchanged), [row(0), row(1), row(2)].concat());
        // rank r sends r rows to each, and rank 0 none
        let rows = rank as i64;
        let sent = filled(3 * rows, rank as f64);
        let exchanged = group.all_to_all_with_splits(&sent, &[rows; 3], &[0, 1, 2]).unwrap();
        assert_eq!((exchanged.size(), floats(&exchanged)), (vec![3, 2], vec![1.0, 1.0, 2.0, 2.0, 2.0, 2.0]));
        let whole = Tensor::zeros([6], (Kind::Float, CPU));
        let mine = whole.narrow(0, 2 * rank as i64, 2);
        mine.shallow_clone().copy_(&own());
        group.all_gather_into(&whole, &mine).unwrap();
        assert_eq!(floats(&whole), [0.0, 1.0, 1.0, 1.0, 2.0, 1.0]);
        group.reduce_scatter_into(&part, &Tensor::ones([6], (Kind::Float, CPU)), ReduceOp::Sum).unwrap();
        assert_eq!(floats(&part), [3.0, 3.0]);
    });
}

#[test]
fn a_value_that_is_nested_too_deep_is_named_as_that() {
    as_ranks_with(
        2,
        |_| Some(("RUST_MIN_STACK", "67108864")),
        |group| {
            let nested =
                |levels: usize| (0..levels).fold(serde_json::Value::Null, |value, _| vec![value].into());
            assert_eq!(group.all_gather_object(&nested(900)).unwrap(), [nested(900), nested(900)]);
            assert_error!(
                group.all_gather_object(&nested(1500)),
                "depth limit exceeded; give a value that is nested in at most"
            );
        },
    );
}

/// Starts an operation of every kind; what they give, flattened, when they are waited for from the last to the first.
fn all_at_once(group: &ProcessGroup, device: Device) -> Vec<Vec<f32>> {
    let rank = group.rank();
    let own = || (Tensor::arange(6, (Kind::Float, CPU)).view([3, 2]) + rank as f64).to_device(device.into());
    let (sum, mean, sent, reduced) = (own(), own(), own(), own());
    let (part, received) = (own().get(0), own());
    let parts = own();
    let wait = |work: Work| work.wait().unwrap();
    let sums = group.start_all_reduce(&sum, ReduceOp::Sum).unwrap();
    let means = group.start_all_reduce(&mean, ReduceOp::Avg).unwrap();
    let broadcast = group.start_broadcast(&sent, 1).unwrap();
    let reduce = group.start_reduce(&reduced, 0, ReduceOp::Avg).unwrap();
    let gather = group.start_all_gather(&own()).unwrap();
    let scatter_sum = group.start_reduce_scatter(&own(), ReduceOp::Sum).unwrap();
    let to_one = group.start_gather(&own(), 2).unwrap();
    let from_one = group.start_scatter(&part, (rank == 1).then_some(&parts), 1).unwrap();
    let exchange = group.start_all_to_all(&own()).unwrap();
    let receive = group.start_recv(&received, (rank + 2) % 3).unwrap();
    let send = group.start_send(&parts, (rank + 1) % 3).unwrap();
    wait(group.start_barrier().unwrap());
    wait(send);
    wait(receive);
    let exchanged = exchange.wait().unwrap();
    wait(from_one);
    let gathered_to_one = to_one.wait().unwrap();
    let summed = scatter_sum.wait().unwrap();
    let gathered = gather.wait().unwrap();
    [reduce, broadcast, means, sums].into_iter().for_each(wait);
    let given = [sum, mean, sent, reduced, gathered, summed, part, exchanged, received];
    given.iter().chain(gathered_to_one.iter()).map(floats).collect()
}

#[test]
fn operations_of_all_kinds_are_under_way_at_once() {
    as_ranks(3, |group| {
        let found = all_at_once(&group, Device::Cpu);
        let rank = group.rank() as f32;
        let numbers = |add: f32| (0..6).map(|i| i as f32 + add).collect::<Vec<_>>();
        assert_eq!(found[0], numbers(0.0).iter().map(|i| 3.0 * i + 3.0).collect::<Vec<_>>());
        assert_eq!(found[1], numbers(1.0));
        assert_eq!(found[2], numbers(1.0));
        assert_eq!(found[3], if rank == 0.0 { numbers(1.0) } else { numbers(rank) });
        assert_eq!(found[4], [numbers(0.0), numbers(1.0), numbers(2.0)].concat());
        assert_eq!(found[5], [6.0 * rank + 3.0, 6.0 * rank + 6.0]);
        assert_eq!(found[6], [2.0 * rank + 1.0, 2.0 * rank + 2.0]);
        assert_eq!(found[8], numbers((rank + 2.0) % 3.0));
        HpuEmulator::init(HpuSettings::default()).unwrap();
        assert_eq!(all_at_once(&group, Device::Hpu(0)), found, "as in memory of the host");
    });
}

#[test]
fn work_that_nobody_waits_for_is_done_when_it_is_dropped() {
    as_ranks(2, |group| {
        let (sum, copy) = (filled(3, 1.0), filled(3, group.rank() as f64));
        drop(group.start_all_reduce(&sum, ReduceOp::Sum).unwrap());
        drop(group.start_broadcast(&copy, 1).unwrap());
        drop(group.start_all_gather(&filled(1000, 1.0)).unwrap()); // its tensors are gone before it is done
        assert_eq!((floats(&sum), floats(&copy)), (vec![2.0; 6], vec![1.0; 6]));
        group.barrier().unwrap();
    });
}

#[test]
fn groups_of_some_ranks_and_groups_within_them() {
    as_ranks(4, |group| {
        let rank = group.rank();
        let own = || filled(2, 10_f64.powi(rank as i32));
        let halves = group.split(&[vec![2, 0], vec![1, 3]]).unwrap().unwrap();
        assert_eq!((halves.rank(), halves.world_size()), (rank / 2, 2));
        assert_eq!(halves.global_ranks(), if rank % 2 == 0 { [0, 2] } else { [1, 3] });
        assert_eq!(halves.backend(), "gloo");
        let sum = |group: &ProcessGroup| {
            let tensor = own();
            group.all_reduce(&tensor, ReduceOp::Sum).unwrap();
            floats(&tensor)[0]
        };
        assert_eq!(sum(&halves), if rank % 2 == 0 { 101.0 } else { 1010.0 });
        let three = group.new_group(&[3, 1, 2]).unwrap();
        assert_eq!(three.is_none(), rank == 0);
        if let Some(three) = &three {
            assert_eq!((three.rank(), three.global_ranks(), sum(three)), (rank - 1, &[1, 2, 3][..], 1110.0));
            // ranks count within the group that is divided
            let two = three.new_group(&[0, 2]).unwrap();
            assert_eq!(two.as_ref().map(|two| two.global_ranks().to_vec()), (rank != 2).then(|| vec![1, 3]));
            if let Some(two) = two {
                assert_eq!(sum(&two), 1010.0);
                assert_eq!(two.broadcast_object(&rank, 1).unwrap(), 3, "rank 1 of the group");
                assert!(two.broadcast(&own(), 2).unwrap_err().to_string().contains("rank 2 of 2"));
            }
        }
        let alone = group.split(&[vec![0], vec![1], vec![2], vec![3]]).unwrap().unwrap();
        assert_eq!((alone.world_size(), sum(&alone)), (1, 10_f32.powi(rank as i32)));
        assert_eq!(sum(&group), 1111.0);
    });
}

#[test]
fn groups_at_work_at_once_are_waited_for_in_any_order() {
    as_ranks(2, |group| {
        let other = group.new_group(&[0, 1]).unwrap().unwrap();
        assert!(group.shares_memory() && other.shares_memory());
        for len in [1, 40_000, 3 << 20] {
            // float32 sums go through shared memory, those of float64 through Gloo
            let tensors: Vec<Tensor> = (0..6)
                .map(|i| {
                    Tensor::full([len], i as f64, (if i % 3 == 2 { Kind::Double } else { Kind::Float }, CPU))
                })
                .collect();
            let start = |(i, tensor): (usize, &Tensor)| {
                let group = if i % 2 == 0 { &*group } else { &other };
                group.start_all_reduce(tensor, ReduceOp::Sum).unwrap()
            };
            let mut works: Vec<_> = tensors.iter().enumerate().map(start).collect();
            if group.rank() == 0 {
                works.reverse();
            }
            let begin = Instant::now();
            works.into_iter().for_each(|work| work.wait().unwrap());
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
            for (i, tensor) in tensors.iter().enumerate() {
                assert!(tensor.equal(&tensor.full_like(2.0 * i as f64)), "{i} of {len}");
            }
            // one is under way while the other is used
            let tensor = filled(len.min(1000), 1.0);
            let work = group.start_all_reduce(&tensor, ReduceOp::Sum).unwrap();
            if group.rank() == 0 {
                other.barrier().unwrap();
                work.wait().unwrap();
            } else {
                work.wait().unwrap();
                other.barrier().unwrap();
            }
        }
    });
}

#[test]
fn what_is_wrong_with_a_group_is_told_on_all_ranks() {
    as_ranks(2, |group| {
        let refused = |groups: &[Vec<usize>]| group.split(groups).unwrap_err().to_string();
        assert!(
            refused(&[vec![0, 2]]).contains("rank 2 of 2; ranks count from 0"),
            "{}",
            refused(&[vec![0, 2]])
        );
        assert!(refused(&[vec![0, 1], vec![1]]).contains("rank 1 is named twice"));
        assert!(refused(&[]).contains("a group without ranks"));
        assert!(refused(&[vec![0, 1], vec![]]).contains("a group without ranks"));
        let differing = group.new_group(&[group.rank()]).unwrap_err().to_string();
        let expected =
            "new_group: rank 0 names [[0]], rank 1 [[1]]; call it with the same ranks on all ranks";
        assert_eq!(differing, expected);
        let tensor = filled(3, 1.0);
        for error in [
            group.all_to_all(&tensor).unwrap_err(),
            group.all_to_all_with_splits(&tensor, &[1, 1], &[1, 1]).unwrap_err(),
            group.all_to_all_with_splits(&tensor, &[4, -1], &[1, 1]).unwrap_err(),
            group.all_to_all_with_splits(&tensor, &[3], &[3]).unwrap_err(),
            group.reduce_scatter(&tensor, ReduceOp::Sum).unwrap_err(),
            group.all_gather_into(&tensor, &tensor).unwrap_err(),
            group.all_gather_into(&tensor.to_kind(Kind::Double), &filled(6, 1.0)).unwrap_err(),
            group.scatter(&tensor, Some(&tensor), group.rank()).unwrap_err(),
            group.scatter(&tensor, None, group.rank()).unwrap_err(),
            group.send(&tensor, group.rank()).unwrap_err(),
            group.gather(&tensor, 2).unwrap_err(),
            group.reduce(&tensor.to_kind(Kind::Int), 0, ReduceOp::Avg).unwrap_err(),
        ] {
            assert!(matches!(error, voltaic::Error::Config(_)), "{error}");
        }
        group.barrier().unwrap(); // nothing was sent
    });
}

#[test]
fn ranks_out_of_step_are_told_in_what_the_others_were() {
    as_ranks_within(2, Duration::from_secs(2), |world| {
        let rank = world.rank();
        let error = |group: &ProcessGroup, body: &dyn Fn(&ProcessGroup) -> voltaic::Result<()>| {
            body(group).unwrap_err().to_string()
        };
        // another operation
        let group = world.new_group(&[0, 1]).unwrap().unwrap();
        let text = error(&group, &|group| match group.rank() {
            0 => group.all_reduce(&filled(4, 1.0), ReduceOp::Max),
            _ => group.broadcast(&filled(4, 1.0), 0),
        });
        let theirs = if rank == 0 { "rank 1 was in broadcast" } else { "rank 0 was in all_reduce" };
        assert!(text.contains(theirs) && text.contains("in the same order on all ranks"), "{text}");
        // tensors of different sizes
        let group = world.new_group(&[0, 1]).unwrap().unwrap();
        let text =
            error(&group, &|group| group.all_reduce(&filled(1 + group.rank() as i64, 1.0), ReduceOp::Sum));
        assert!(
            text.contains("bytes of Float where this rank sums") || text.contains("was in all_reduce"),
            "{text}"
        );
    });
}

#[test]
fn a_rank_killed_in_a_group_is_named_and_the_others_go_on() {
    if !crate::probe::plays("rank of 4") {
        // rank 3 is killed, so that its end is not looked at
        return crate::distributed::start_ranks(4, |rank| rank != 3);
    }
    as_ranks_within(4, Duration::from_secs(20), |world| {
        let rank = world.rank();
        let pairs = world.split(&[vec![0, 1], vec![2, 3]]).unwrap().unwrap();
        pairs.barrier().unwrap();
        if rank == 3 {
            let works: Vec<_> =
                (0..3).map(|_| pairs.start_all_reduce(&filled(2, 1.0), ReduceOp::Max).unwrap()).collect();
            Command::new("kill").args(["-KILL", &std::process::id().to_string()]).status().unwrap();
            std::thread::sleep(Duration::from_secs(60));
            drop(works);
        }
        let begin = Instant::now();
        let mut done = Ok(());
        while done.is_ok() && rank == 2 {
            done = pairs.all_reduce(&filled(2, 1.0), ReduceOp::Max);
        }
        if let Err(error) = done {
            assert_contains!(
                error.to_string(),
                "among ranks 2, 3 failed on rank 2 of 4, rank 3 did not take part"
            );
            assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
        }
        let rest = filled(2, 1.0);
        if rank < 2 {
            pairs.all_reduce(&rest, ReduceOp::Sum).unwrap();
            assert_eq!(floats(&rest), [2.0; 4]);
        }
    });
}
