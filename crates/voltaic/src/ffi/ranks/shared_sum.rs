//! Sums over ranks of one host through memory that they share.
//!
//! A tensor travels in pieces. Each rank writes its piece to its ring, adds up one part of all ranks' pieces, and takes the
//! other parts from those that have added them up: with `n` ranks `2 (n - 1) / n` of a tensor is read and as much written,
//! without a system call unless a rank has to wait.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tch::{Kind, Tensor};

use crate::error::{Result, TorchError, TorchErrorKind};
use crate::ffi::ranks::shared_memory::{Filled, RING, Region, SLOTS, Stage, Stop};
use crate::ffi::switch::read_switch;
use crate::kernels::{Bf16, Dtype, Floats, FloatsMut, LINE, add_up};

const OP: &str = "all_reduce";
/// The most bytes of a piece: several fit in a ring, so that ranks need not keep step.
const MAX_PIECE: usize = RING / 4;

/// Whether this process is to share memory: unless `VOLTAIC_SHARED_MEMORY=0`.
///
/// # Errors
/// [`SwitchError`](crate::error::SwitchError) if the variable is neither `0` nor `1`.
pub fn shares_memory() -> Result<bool> {
    Ok(read_switch("VOLTAIC_SHARED_MEMORY", "Gloo")?.unwrap_or(true))
}

/// Those of this process's groups that share their order.
static EXCHANGES: Mutex<Vec<Weak<Mutex<Exchange>>>> = Mutex::new(Vec::new());

/// Where an operation stands in the order in which this process has started those of all groups.
pub fn next_ticket() -> u64 {
    static TICKETS: AtomicU64 = AtomicU64::new(1);
    TICKETS.fetch_add(1, Ordering::Relaxed)
}

/// The memory of this rank, which others are to open.
#[derive(Debug)]
pub struct Home(Region);

impl Home {
    /// Makes it.
    ///
    /// # Errors
    /// The system's.
    pub fn new() -> io::Result<Self> {
        Region::create().map(Self)
    }

    /// Where ranks on this host find it.
    pub fn address(&self) -> String {
        self.0.address()
    }

    /// Opens the memory of the others; `addresses` are those of all ranks in order.
    ///
    /// # Errors
    /// The system's, if one is on another host or out of reach.
    pub fn open_others(self, rank: usize, addresses: &[String], timeout: Duration) -> io::Result<Neighbours> {
        let others = addresses.iter().enumerate().filter(|(other, _)| *other != rank);
        let mut regions = others.map(|(_, address)| Region::open(address)).collect::<io::Result<Vec<_>>>()?;
        regions.insert(rank, self.0);
        let exchange = Exchange { rank, regions, timeout, ..Exchange::default() };
        Ok(Neighbours(Arc::new(Mutex::new(exchange))))
    }
}

/// Ranks that share memory. All of them start the same sums in the same order.
#[derive(Debug)]
pub struct Neighbours(Arc<Mutex<Exchange>>);

impl Neighbours {
    /// Lets a wait for any group of this process finish the sums that were started before it here, see
    /// [`Summing::finish_before`]. This is for processes that are one rank each.
    pub fn share_order(&self) {
        let mut known = EXCHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|exchange| exchange.strong_count() > 0);
        known.push(Arc::downgrade(&self.0));
    }

    /// Whether sums of such tensors go this way; the tensor must be in memory of the host, one number after the other.
    pub fn can_sum(tensor: &Tensor) -> bool {
        matches!(tensor.kind(), Kind::Float | Kind::BFloat16) && tensor.numel() > 0
    }

    /// Starts to replace a contiguous tensor of the host's memory by the sum over all ranks, added up in their order in
    /// float32. It must be left alone until the sum is complete.
    ///
    /// # Errors
    /// If a rank is gone or does not come within the time-out: with much under way, this waits for earlier sums.
    pub fn start_sum(&self, tensor: &Tensor) -> Result<Summing, TorchError> {
        let ticket = next_ticket();
        let last = lock(&self.0).start(tensor, ticket)?;
        Ok(Summing { exchange: self.0.clone(), ticket, last })
    }
}

/// A sum under way. Dropping it waits, too.
#[derive(Debug)]
pub struct Summing {
    exchange: Arc<Mutex<Exchange>>,
    /// See [`next_ticket`].
    ticket: u64,
    /// Its last piece.
    last: u64,
}

impl Summing {
    /// Waits until it is complete.
    ///
    /// # Errors
    /// If a rank is gone, does not come within the time-out, or sums another tensor.
    pub fn wait(self) -> Result<(), TorchError> {
        Self::finish_before(self.ticket);
        lock(&self.exchange).finish(self.last)
    }

    /// Finishes the sums of all groups that were started before an operation. To be called before that operation is waited
    /// for: another rank may wait for those sums first, and they need this one. A failure is told to who waits for them.
    pub fn finish_before(ticket: u64) {
        let exchanges: Vec<_> = {
            let known = EXCHANGES.lock().unwrap_or_else(PoisonError::into_inner);
            known.iter().filter_map(Weak::upgrade).collect()
        };
        loop {
            let oldest = |exchange: &Arc<Mutex<Exchange>>| {
                lock(exchange).open.front().map(|piece| (piece.ticket, piece.number))
            };
            let open = exchanges.iter().filter_map(|exchange| Some((oldest(exchange)?, exchange)));
            let Some(((_, number), exchange)) =
                open.filter(|((other, _), _)| *other < ticket).min_by_key(|((other, _), _)| *other)
            else {
                return;
            };
            let _ = lock(exchange).finish(number);
        }
    }
}

impl Drop for Summing {
    fn drop(&mut self) {
        let _ = lock(&self.exchange).finish(self.last); // a failure is told to the next who asks
    }
}

fn lock(exchange: &Mutex<Exchange>) -> MutexGuard<'_, Exchange> {
    exchange.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A part of a tensor under way.
#[derive(Debug)]
struct Piece {
    number: u64,
    /// Of its sum; see [`next_ticket`].
    ticket: u64,
    tensor: Tensor,
    /// Its bytes in the tensor.
    bytes: Range<usize>,
    /// What this rank's ring holds of it.
    filled: Filled,
}

#[derive(Debug, Default)]
struct Exchange {
    rank: usize,
    /// Of all ranks.
    regions: Vec<Region>,
    timeout: Duration,
    /// Pieces that have been started, and those of them that this rank has finished.
    started: u64,
    finished: u64,
    open: VecDeque<Piece>,
    /// Where pieces lie that others may still read.
    places: VecDeque<(u64, Range<usize>)>,
    /// Where the next one goes.
    next: usize,
    /// Why no sum succeeds any more.
    failure: Option<String>,
}

impl Exchange {
    /// Returns the number of the last piece.
    fn start(&mut self, tensor: &Tensor, ticket: u64) -> Result<u64, TorchError> {
        self.check()?;
        let item = tensor.kind().elt_size_in_bytes();
        let len = tensor.numel() * item;
        for first in (0..len).step_by(MAX_PIECE) {
            let bytes = first..(first + MAX_PIECE).min(len);
            let place = self.make_place(bytes.len())?;
            let filled = Filled { place, kind: tensor.kind() };
            let number = self.started + 1;
            let piece = Piece { number, ticket, tensor: tensor.shallow_clone(), bytes, filled };
            let (region, mine) = (&self.regions[self.rank], piece.part(self.rank, self.regions.len()));
            for other in [0..mine.start, mine.end..piece.bytes.len()] {
                let ring = region.ring(within(&piece.filled.place, &other));
                // SAFETY: the piece has these bytes, and the ring room for them that nobody reads now.
                unsafe { piece.data(&other).copy_to_nonoverlapping(ring, other.len()) };
            }
            region.set_filled(piece.number, &piece.filled);
            region.advance(Stage::Filled, piece.number);
            self.started = piece.number;
            self.open.push_back(piece);
        }
        Ok(self.started)
    }

    /// Room in the ring that no rank reads any more; finishes earlier pieces if there is none.
    fn make_place(&mut self, len: usize) -> Result<Range<usize>, TorchError> {
        let taken =
            self.others().map(|rank| self.regions[rank].count(Stage::Taken)).min().unwrap_or(u64::MAX);
        while self.places.front().is_some_and(|(number, _)| *number <= taken.min(self.finished)) {
            self.places.pop_front();
        }
        if self.places.is_empty() || self.next + len > RING {
            self.next = 0; // the caches know that memory
        }
        let place = self.next..self.next + len;
        let overlaps = |other: &Range<usize>| other.start < place.end && place.start < other.end;
        while self.places.len() as u64 >= SLOTS || self.places.iter().any(|(_, other)| overlaps(other)) {
            let Some((number, _)) = self.places.pop_front() else { break };
            self.finish(number)?;
            self.wait_for_others(Stage::Taken, number)?;
        }
        self.next = place.end.next_multiple_of(LINE);
        self.places.push_back((self.started + 1, place.clone()));
        Ok(place)
    }

    /// Finishes pieces up to this one.
    fn finish(&mut self, number: u64) -> Result<(), TorchError> {
        while self.finished < number {
            self.check()?;
            let Some(piece) = self.open.pop_front() else { break };
            self.finish_piece(&piece)?;
            self.finished = piece.number;
        }
        Ok(())
    }

    fn finish_piece(&mut self, piece: &Piece) -> Result<(), TorchError> {
        let number = piece.number;
        self.wait_for_others(Stage::Filled, number)?;
        let ranks = self.regions.len();
        let filled: Vec<_> = self.regions.iter().map(|region| region.filled(number)).collect();
        let what = |filled: &Filled| (filled.place.len(), filled.kind);
        if let Some(rank) = filled.iter().position(|theirs| what(theirs) != what(&piece.filled)) {
            let (their_len, their_kind) = what(&filled[rank]);
            let (len, kind) = what(&piece.filled);
            return Err(self.fail(format!(
                "rank {rank} sums {their_len} bytes of {their_kind:?} where this rank sums {len} of {kind:?}"
            )));
        }
        let in_ring =
            |rank: usize, bytes: &Range<usize>| self.regions[rank].ring(within(&filled[rank].place, bytes));
        let mine = piece.part(self.rank, ranks);
        let (dtype, bytes) = match piece.filled.kind {
            Kind::Float => (Dtype::Float32, size_of::<f32>()),
            _ => (Dtype::Bfloat16, size_of::<Bf16>()),
        };
        let len = mine.len() / bytes;
        let parts: Vec<Floats> = (0..ranks)
            .map(|rank| {
                let first = if rank == self.rank { piece.data(&mine) } else { in_ring(rank, &mine) };
                // SAFETY: the piece has these numbers, and all others have written theirs and leave them alone until this
                // rank has taken all.
                unsafe { Floats::of_address(dtype, first.cast(), len) }
            })
            .collect();
        // SAFETY: this part of the ring is read by nobody before it is said to be summed.
        let out = unsafe { FloatsMut::of_address(dtype, in_ring(self.rank, &mine).cast(), len) };
        add_up(&parts, out);
        self.regions[self.rank].advance(Stage::Summed, number);
        self.wait_for_others(Stage::Summed, number)?;
        for (rank, theirs) in filled.iter().enumerate() {
            let part = piece.part(rank, ranks);
            let sums = self.regions[rank].ring(within(&theirs.place, &part));
            // SAFETY: the sums are there, and stay until this rank has taken them; the piece has room for them.
            unsafe { sums.copy_to_nonoverlapping(piece.data(&part), part.len()) };
        }
        self.regions[self.rank].advance(Stage::Taken, number);
        Ok(())
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.regions.len()).filter(move |other| *other != rank)
    }

    fn wait_for_others(&mut self, stage: Stage, number: u64) -> Result<(), TorchError> {
        for rank in self.others() {
            let why = match self.regions[rank].wait(stage, number, self.timeout) {
                Ok(()) => continue,
                Err(Stop::Gone) => format!("rank {rank} has ended or left the group"),
                Err(Stop::TimedOut) => {
                    format!("timed out after {} s of waiting for rank {rank}", self.timeout.as_secs_f32())
                }
            };
            return Err(self.fail(why));
        }
        Ok(())
    }

    /// Notes that ranks are out of step from now on.
    fn fail(&mut self, why: String) -> TorchError {
        self.open.clear();
        let error = failed(&why);
        self.failure = Some(why);
        error
    }

    fn check(&self) -> Result<(), TorchError> {
        self.failure.as_deref().map_or(Ok(()), |why| Err(failed(why)))
    }
}

fn failed(why: &str) -> TorchError {
    TorchError::new(OP, TorchErrorKind::Other, why)
}

impl Piece {
    /// Bytes of the piece that a rank adds up.
    fn part(&self, rank: usize, ranks: usize) -> Range<usize> {
        let part = self.bytes.len().div_ceil(ranks).next_multiple_of(LINE);
        let end = |rank: usize| (rank * part).min(self.bytes.len());
        end(rank)..end(rank + 1)
    }

    /// The address of bytes of the piece in the tensor.
    fn data(&self, bytes: &Range<usize>) -> *mut u8 {
        self.tensor.data_ptr().cast::<u8>().wrapping_add(self.bytes.start + bytes.start)
    }
}

/// A part of a range, counted from its start.
fn within(whole: &Range<usize>, part: &Range<usize>) -> Range<usize> {
    whole.start + part.start..whole.start + part.end
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a body with the neighbours of each rank, on a thread of its own.
    fn as_ranks(ranks: usize, timeout: Duration, body: impl Fn(usize, Neighbours) + Sync) {
        let homes: Vec<Home> = (0..ranks).map(|_| Home::new().unwrap()).collect();
        let addresses: Vec<String> = homes.iter().map(Home::address).collect();
        std::thread::scope(|scope| {
            for (rank, home) in homes.into_iter().enumerate() {
                let (addresses, body) = (&addresses, &body);
                scope.spawn(move || body(rank, home.open_others(rank, addresses, timeout).unwrap()));
            }
        });
    }

    fn numbers_of(rank: usize, len: usize, kind: Kind) -> Tensor {
        let number = |i: usize| ((i * 7 + rank * 31) % 61) as f32 - 30.0;
        Tensor::from_slice(&(0..len).map(number).collect::<Vec<_>>()).to_kind(kind)
    }

    #[test]
    fn all_ranks_have_the_sum() {
        for ranks in [2, 3, 5] {
            as_ranks(ranks, Duration::from_secs(60), |rank, neighbours| {
                for kind in [Kind::Float, Kind::BFloat16] {
                    for len in [1, 3, 33, 1000, 70_001] {
                        let tensor = numbers_of(rank, len, kind);
                        neighbours.start_sum(&tensor).unwrap().wait().unwrap();
                        let all: Vec<_> = (0..ranks).map(|rank| numbers_of(rank, len, kind)).collect();
                        assert_eq!(
                            tensor,
                            Tensor::stack(&all, 0).sum_dim_intlist(0, false, kind),
                            "{ranks} ranks, {len}"
                        );
                    }
                }
            });
        }
    }

    #[test]
    fn more_than_a_ring_may_be_under_way() {
        let len = RING / size_of::<f32>() / 3 + 5;
        as_ranks(2, Duration::from_secs(60), |rank, neighbours| {
            let tensors: Vec<_> = (0..5).map(|i| numbers_of(rank + i, len, Kind::Float)).collect();
            let mut sums: Vec<_> =
                tensors.iter().map(|tensor| neighbours.start_sum(tensor).unwrap()).collect();
            let small: Vec<_> = (0..200).map(|_| Tensor::from_slice(&[rank as f32 + 1.0])).collect();
            sums.extend(small.iter().map(|tensor| neighbours.start_sum(tensor).unwrap()));
            sums.into_iter().rev().for_each(|sum| sum.wait().unwrap());
            for (i, tensor) in tensors.iter().enumerate() {
                assert_eq!(tensor, &(numbers_of(i, len, Kind::Float) + numbers_of(1 + i, len, Kind::Float)));
            }
            assert!(small.iter().all(|tensor| tensor.double_value(&[]) == 3.0));
        });
    }

    #[test]
    fn a_rank_that_leaves_or_does_not_come_is_named() {
        as_ranks(3, Duration::from_millis(200), |rank, neighbours| {
            let tensor = numbers_of(rank, 100, Kind::Float);
            neighbours.start_sum(&tensor).unwrap().wait().unwrap();
            if rank == 1 {
                return;
            }
            let error = neighbours.start_sum(&tensor).unwrap().wait().unwrap_err();
            assert!(error.message.contains("rank 1 has ended or left the group"), "{error}");
            let again = neighbours.start_sum(&tensor).unwrap_err();
            assert_eq!(again.message, error.message);
        });
        as_ranks(2, Duration::from_millis(200), |rank, neighbours| {
            if rank == 1 {
                return std::thread::sleep(Duration::from_secs(1));
            }
            let error = neighbours.start_sum(&numbers_of(0, 9, Kind::Float)).unwrap().wait().unwrap_err();
            assert!(error.message.contains("timed out after 0.2 s of waiting for rank 1"), "{error}");
            drop(neighbours);
        });
    }

    #[test]
    fn ranks_that_sum_different_tensors_are_told() {
        for tensors in [[(10, Kind::Float), (11, Kind::Float)], [(10, Kind::Float), (20, Kind::BFloat16)]] {
            as_ranks(2, Duration::from_secs(60), |rank, neighbours| {
                let (len, kind) = tensors[rank];
                let error = neighbours.start_sum(&numbers_of(rank, len, kind)).unwrap().wait().unwrap_err();
                let what =
                    tensors.map(|(len, kind)| format!("{} of {kind:?}", len * kind.elt_size_in_bytes()));
                let expected = format!(
                    "rank {} sums {} where this rank sums {}",
                    1 - rank,
                    what[1 - rank].replace(" of", " bytes of"),
                    what[rank]
                );
                assert!(error.message.contains(&expected), "{error}");
            });
        }
    }
}
