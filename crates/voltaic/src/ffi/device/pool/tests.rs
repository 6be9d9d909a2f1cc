use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::policy::{CACHE_FLOOR, IDLE_SECS, TIGHT_SECS};
use super::*;

const MIB: usize = 1 << 20;

fn pool(limit: Option<usize>) -> &'static Pool {
    Box::leak(Box::new(Pool::new(7, limit)))
}

fn release(block: NonNull<u8>) {
    // SAFETY: each test releases a block that a pool gave it, once.
    unsafe { Pool::release(block) }
}

/// A block whose bytes all say whose it is.
struct Marked {
    block: NonNull<u8>,
    bytes: usize,
    mark: u8,
}

// SAFETY: a block may be used on any thread by its holder.
unsafe impl Send for Marked {}

impl Marked {
    fn new(pool: &'static Pool, bytes: usize, mark: u8) -> Self {
        let block = pool.allocate(bytes).expect("memory");
        // SAFETY: the block is at least `bytes` long and has no other user.
        unsafe { block.write_bytes(mark, bytes) };
        Self { block, bytes, mark }
    }

    fn check_and_release(self) {
        // SAFETY: the block is still ours, and `new` wrote all its bytes.
        let content = unsafe { std::slice::from_raw_parts(self.block.as_ptr(), self.bytes) };
        assert!(content.iter().all(|&byte| byte == self.mark), "somebody else wrote to this block");
        // SAFETY: the block came from a pool and is released once.
        assert_eq!(unsafe { Pool::requested_bytes(self.block) }, self.bytes);
        release(self.block);
    }
}

#[test]
fn blocks_are_aligned_and_come_back() {
    let pool = pool(None);
    for bytes in [1, 64, 65, 4096, 100_000, MIB, 3 * MIB + 1] {
        let block = pool.allocate(bytes).unwrap();
        assert_eq!(block.as_ptr() as usize % 64, 0, "{bytes} bytes");
        release(block);
        assert_eq!(pool.allocate(bytes), Some(block), "{bytes} bytes: the same block again");
        release(block);
    }
    let stats = pool.stats();
    // 1 and 64 bytes are one block size
    assert_eq!((stats.num_allocs, stats.num_frees, stats.total_system_allocs), (14, 14, 6));
    assert_eq!(pool.trim(), stats.reserved);
    let stats = pool.stats();
    assert_eq!((stats.reserved, stats.in_use), (0, 0));
    assert_eq!(pool.id(), 7);
}

#[test]
fn threads_share_a_pool_without_sharing_blocks() {
    let pool = pool(None);
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..4).map(|_| mpsc::channel::<Marked>()).unzip();
    thread::scope(|scope| {
        for (me, inbox) in receivers.into_iter().enumerate() {
            let senders = senders.clone();
            scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(me as u64);
                let mut kept = Vec::new();
                for round in 0..3000_u32 {
                    let bytes = 1_usize << rng.random_range(0..13);
                    let marked = Marked::new(pool, bytes + rng.random_range(0..bytes), rng.random());
                    if round % 3 == 0 {
                        senders[rng.random_range(0..4)].send(marked).expect("the receiver lives");
                    } else {
                        kept.push(marked);
                    }
                    if kept.len() > 20 {
                        kept.swap_remove(rng.random_range(0..20)).check_and_release();
                    }
                    inbox.try_iter().for_each(Marked::check_and_release);
                    if round % 1000 == 999 {
                        pool.trim();
                    }
                }
                drop(senders);
                kept.into_iter().for_each(Marked::check_and_release);
                inbox.iter().for_each(Marked::check_and_release);
            });
        }
        drop(senders);
    });
    let stats = pool.stats();
    assert_eq!((stats.num_allocs, stats.num_frees, stats.in_use), (12_000, 12_000, 0));
    pool.trim();
    assert_eq!(pool.stats().reserved, 0);
}

#[test]
fn the_limit_is_kept_and_cached_blocks_make_room() {
    let pool = pool(Some(64 * MIB));
    let blocks: Vec<_> = (0..16).map(|_| pool.allocate(4 * MIB).unwrap()).collect();
    let before = pool.stats();
    assert_eq!(pool.allocate(1), None);
    assert_eq!(pool.stats(), before, "a refusal changes no counter");
    blocks.into_iter().for_each(release);
    let large = pool.allocate(64 * MIB).expect("the cached blocks make room");
    assert_eq!((pool.stats().in_use, pool.stats().cached() >> 20), (64 * MIB, 0));
    release(large);
    pool.set_limit(Some(128 * MIB));
    let more = pool.allocate(100 * MIB).expect("the new limit");
    release(more);
    assert_eq!(pool.allocate(usize::MAX), None);
    pool.trim();
}

#[test]
fn a_system_without_memory_is_a_refusal() {
    let pool = pool(None);
    assert_eq!(pool.allocate(1 << 46), None, "64 TiB are more than an address space holds");
    assert_eq!(pool.stats(), PoolStats::default());
}

#[test]
fn without_caching_blocks_go_straight_back() {
    let pool = pool(None);
    release(pool.allocate(2 * MIB).unwrap());
    pool.set_caching(false);
    assert_eq!(pool.stats().reserved, 0);
    let block = Marked::new(pool, 3 * MIB, 9);
    pool.set_caching(true);
    block.check_and_release();
    assert_eq!(pool.stats().cached(), 3 * MIB, "a block from the heap may be cached too");
    assert_eq!(pool.trim(), 3 * MIB);
}

#[test]
fn idle_blocks_go_back_at_the_end_of_a_window() {
    let pool = pool(None);
    let bytes = CACHE_FLOOR / 2;
    let blocks: Vec<_> = (0..3).map(|_| pool.allocate(bytes).unwrap()).collect();
    blocks.into_iter().for_each(release);
    let end_window = |now_secs| {
        let before = pool.stats().reserved;
        let (discarded, ranges) = pool.state.lock().end_window(now_secs, false);
        discarded.release(pool);
        ranges.into_iter().for_each(release_pages);
        before - pool.stats().reserved
    };
    assert_eq!(end_window(IDLE_SECS), 0, "all three were in use since the start");
    assert_eq!(end_window(2 * IDLE_SECS - 1), 0, "the window has not ended");
    release(pool.allocate(bytes).unwrap());
    assert_eq!(end_window(2 * IDLE_SECS), bytes, "down to the floor, which may stay");
    assert_eq!(end_window(3 * IDLE_SECS), 0);
    pool.trim();
}

#[test]
fn blocks_of_changing_sizes_share_pages_and_stay_near_what_is_in_use() {
    let pool = pool(None);
    let mut rng = StdRng::seed_from_u64(11);
    let mut highest = 0;
    for step in 0..25 {
        let scale = rng.random_range(1..=8);
        let blocks: Vec<_> = (1..=5_usize)
            .map(|layer| Marked::new(pool, scale * layer * 300_000 + rng.random_range(0..4096), layer as u8))
            .collect();
        highest = pool.stats().in_use.max(highest);
        blocks.into_iter().for_each(Marked::check_and_release);
        let stats = pool.stats();
        let allowed = highest + (highest / 8).max(CACHE_FLOOR) + MIB;
        assert!(stats.reserved <= allowed, "step {step}: {stats}, {highest} were in use at most");
    }
    let stats = pool.stats();
    assert!(stats.total_system_allocs < stats.num_allocs / 4, "most are cut from pages of others: {stats:?}");
    assert_eq!(pool.trim(), stats.reserved);
    assert_eq!(pool.stats().reserved, 0);
}

#[test]
fn tight_memory_keeps_nothing_that_is_idle() {
    let pool = pool(None);
    let blocks: Vec<_> = [100, 2 * MIB, 3 * MIB].map(|bytes| pool.allocate(bytes).unwrap()).into();
    blocks.into_iter().for_each(release);
    let end_window = |now_secs| {
        let (discarded, ranges) = pool.state.lock().end_window(now_secs, true);
        discarded.release(pool);
        ranges.into_iter().for_each(release_pages);
        pool.stats().reserved
    };
    assert_eq!(end_window(TIGHT_SECS), 5 * MIB + 112, "all were in use since the start");
    release(pool.allocate(100).unwrap());
    assert_eq!(end_window(2 * TIGHT_SECS), 112, "the small one was needed");
    assert_eq!(end_window(3 * TIGHT_SECS), 0);
}

#[test]
fn a_twin_stays_with_its_block_until_the_system_gets_it() {
    static DROPPED: AtomicUsize = AtomicUsize::new(0);
    let pool: &'static Pool = Box::leak(Box::new(Pool::new(1, None).with_drop_twin(|twin| {
        DROPPED.fetch_add(twin as usize, Ordering::Relaxed);
    })));
    let block = pool.allocate(100).unwrap();
    // SAFETY: the block is handed out; its place for a twin is valid until it is released.
    unsafe { Pool::twin_of(block).write(5 as *mut c_void) };
    release(block);
    let again = pool.allocate(100).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { Pool::twin_of(again).read() } as usize, 5);
    release(again);
    assert_eq!(DROPPED.load(Ordering::Relaxed), 0);
    pool.trim();
    assert_eq!(DROPPED.load(Ordering::Relaxed), 5);

    let big = pool.allocate(80 * MIB).unwrap();
    // SAFETY: as above.
    unsafe { Pool::twin_of(big).write(7 as *mut c_void) };
    release(big);
    let smaller = pool.allocate(60 * MIB).unwrap();
    let other = pool.allocate(70 * MIB).unwrap();
    assert_eq!(DROPPED.load(Ordering::Relaxed), 12, "a block of another size is cut from its pages");
    // SAFETY: as above.
    assert!(unsafe { Pool::twin_of(smaller).read().is_null() && Pool::twin_of(other).read().is_null() });
    release(smaller);
    release(other);
    pool.trim();
}

#[test]
fn a_child_of_a_fork_can_allocate() {
    let pool = pool(None);
    let stop = AtomicUsize::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            while stop.load(Ordering::Relaxed) == 0 {
                release(pool.allocate(1000).expect("memory"));
            }
        });
        for _ in 0..50 {
            pool.before_fork();
            // SAFETY: the child calls nothing but the pool (which was held still) and _exit.
            let child = unsafe { libc::fork() };
            // SAFETY: before_fork ran in this thread, and once for each of the two processes.
            unsafe { pool.after_fork() };
            if child == 0 {
                // SAFETY: a child that waits for ever ends by SIGALRM, and the test fails.
                unsafe { libc::alarm(20) };
                let block = pool.allocate(1000);
                block.into_iter().for_each(release);
                // SAFETY: ends the child without running what belongs to the parent.
                unsafe { libc::_exit(i32::from(block.is_none())) };
            }
            let mut status = 0;
            // SAFETY: waits for the child just made; the out-pointer is valid.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0);
        }
        stop.store(1, Ordering::Relaxed);
    });
}
