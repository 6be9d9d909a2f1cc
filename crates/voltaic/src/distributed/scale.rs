//! What joining, watching and a failure cost the store, by the number of ranks: `make stress` prints a table.
//!
//! Ranks are threads with a connection each, eight to a node, that do nothing else.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use super::environment::ClusterEnvironment;
use super::facts::Facts;
use super::flight::inquest::{Failed, Inquest};
use super::flight::watchdog::Watchdog;
use super::placement::RankPlacement;
use super::roll_call::{Meeting, Terms, roll_call};
use crate::ffi::{JobSecret, Listen, Store, store_requests};

/// Ranks of a node.
const DEVICES: usize = 8;
const TIMEOUT: Duration = Duration::from_secs(120);
/// How long ranks only watch.
const WATCH: Duration = Duration::from_secs(4);

fn placement(rank: usize, world_size: usize, port: u16) -> RankPlacement {
    RankPlacement {
        environment: ClusterEnvironment::Lightning,
        rank,
        world_size,
        local_rank: rank % DEVICES,
        node_rank: rank / DEVICES,
        master_addr: "127.0.0.1".to_owned(),
        master_port: port,
        hosts_store: false,
        launcher: None,
        elastic_run: None,
        secret: None,
        attempt: 0,
    }
}

/// As many facts as a small run has.
fn terms() -> Terms {
    let mut facts = Facts::default();
    (0..100).for_each(|n| facts.add(format!("trainer.key_{n}"), "a value of some length"));
    Terms { facts, allowed: Vec::new() }
}

/// Requests and seconds of each phase.
struct Costs {
    ranks: usize,
    join: (u64, f64),
    meet: (u64, f64),
    watch: f64,
    failure: (u64, f64),
    /// Ranks that did not find out which one is missing.
    wrong: u64,
}

fn costs(ranks: usize) -> Costs {
    let server = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (_server, port) = Store::tcp("127.0.0.1", 0, Some(Listen::At(server)), TIMEOUT).unwrap();
    let secret = JobSecret::of(&JobSecret::random_text());
    let (start, step) = (Arc::new(Barrier::new(ranks + 1)), Arc::new(Barrier::new(ranks + 1)));
    let (slowest, wrong) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let threads: Vec<_> = (0..ranks)
        .map(|rank| {
            let (start, step, secret) = (start.clone(), step.clone(), secret.clone());
            let (slowest, wrong) = (slowest.clone(), wrong.clone());
            std::thread::spawn(move || {
                let (store, _) = Store::tcp("127.0.0.1", port, None, TIMEOUT).unwrap();
                let hello = Arc::new(store.with_prefix("hello").unwrap());
                let own = Arc::new(store.sealed(&secret).unwrap().with_prefix("job").unwrap());
                let placement = placement(rank, ranks, port);
                start.wait();
                let meeting = Meeting { store: own, hello, job: "job".to_owned() };
                let round = roll_call(&placement, meeting, TIMEOUT, terms()).unwrap();
                step.wait(); // joined
                step.wait();
                let watchdog = Arc::new(Watchdog::start(&placement, &round.store).unwrap());
                watchdog.meet_node_peers();
                step.wait(); // met
                step.wait(); // watched
                step.wait();
                if rank + 1 < ranks {
                    // the last one is missing
                    let began = Instant::now();
                    let failed = Failed { op: "all_reduce".to_owned(), seq: 1, bytes: 4, has_peer: false };
                    let inquest = Inquest {
                        store: round.store.clone(),
                        watchdog: watchdog.clone(),
                        rank,
                        members: (0..ranks).collect(),
                        failed,
                    };
                    let missing = inquest.hold().map(|report| report.missing);
                    slowest.fetch_max(began.elapsed().as_micros() as u64, Ordering::Relaxed);
                    if missing != Some(vec![ranks - 1]) {
                        wrong.fetch_add(1, Ordering::Relaxed);
                    }
                }
                step.wait(); // failed
                step.wait();
            })
        })
        .collect();
    let phase = |begin: &Barrier, end: &Barrier| {
        let requests = store_requests();
        begin.wait();
        let began = Instant::now(); // all are connected to the store
        end.wait();
        (store_requests() - requests, began.elapsed().as_secs_f64())
    };
    let join = phase(&start, &step);
    let meet = phase(&step, &step);
    let before = store_requests();
    std::thread::sleep(WATCH);
    let watch = (store_requests() - before) as f64 / WATCH.as_secs_f64();
    step.wait();
    let (requests, _) = phase(&step, &step);
    step.wait();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let seconds = slowest.load(Ordering::Relaxed) as f64 / 1e6;
    Costs { ranks, join, meet, watch, failure: (requests, seconds), wrong: wrong.load(Ordering::Relaxed) }
}

#[test]
#[ignore = "measures; make stress runs it"]
fn what_ranks_cost_the_store() {
    println!(
        "| ranks | join: requests per rank | s | meet: requests per rank | s | watch: requests per second and rank | failure: requests per rank | s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for ranks in [8, 64, 512] {
        let Costs { ranks, join, meet, watch, failure, wrong } = costs(ranks);
        let per_rank = |requests: u64| requests as f64 / ranks as f64;
        println!(
            "| {ranks} | {:.1} | {:.2} | {:.1} | {:.2} | {:.2} | {:.1} | {:.2} | {wrong} |",
            per_rank(join.0),
            join.1,
            per_rank(meet.0),
            meet.1,
            watch / ranks as f64,
            per_rank(failure.0),
            failure.1
        );
        // constant, but for what rank 0 reads of all
        assert!(per_rank(join.0) < 40.0 && per_rank(meet.0) < 10.0 && watch / (ranks as f64) < 1.0);
        assert!(per_rank(failure.0) < 40.0 && wrong == 0);
    }
}

#[test]
fn ranks_ask_the_store_when_the_beacon_of_their_node_stands_still() {
    let server = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (store, port) = Store::tcp("127.0.0.1", 0, Some(Listen::At(server)), TIMEOUT).unwrap();
    let store = Arc::new(store);
    let mut watchdogs: Vec<_> =
        (0..3).map(|rank| Watchdog::start(&placement(rank, 3, port), &store).unwrap()).collect();
    watchdogs.iter().for_each(Watchdog::meet_node_peers);
    let flight = store.with_prefix("flight").unwrap();
    let has_answered = |rank: usize, alarm: i64| {
        let deadline = Instant::now() + Duration::from_millis(1400);
        let text = format!("\"alarm\":{alarm},");
        let is_it =
            |bytes: Option<Vec<u8>>| bytes.is_some_and(|b| String::from_utf8_lossy(&b).contains(&text));
        while Instant::now() < deadline {
            if is_it(flight.wait(&format!("position/{rank}"), Duration::from_millis(50)).unwrap()) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    };
    let alarm = watchdogs[1].raise_alarm().unwrap();
    assert!(has_answered(0, alarm) && has_answered(2, alarm), "by the beacon");
    drop(watchdogs.remove(0)); // as if it had been killed: it is not counted any more
    let alarm = watchdogs[0].raise_alarm().unwrap();
    assert!(has_answered(2, alarm), "by the store");
}
