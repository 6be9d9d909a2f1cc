//! Sums over ranks of one host, and parts of all of them, through memory that they share.
//!
//! A tensor travels in pieces. Each rank writes its piece to its ring, adds up one part of all ranks' pieces, and takes the
//! other parts from those that have added them up: with `n` ranks `2 (n - 1) / n` of a tensor is read and as much written,
//! without a system call unless a rank has to wait. A reduce_scatter or an all_gather takes half of that.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tch::{Kind, Tensor};

use crate::config::read_switch;
use crate::error::{Result, TorchError, TorchErrorKind};
use crate::ffi::graph::frozen::note_writes;
use crate::ffi::ranks::shared_memory::{Exchanged, Filled, RING, Region, SLOTS, Stage, Stop};
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

/// The exchanges of this process's groups that share their order.
static EXCHANGES: Mutex<Vec<Weak<Mutex<Exchange>>>> = Mutex::new(Vec::new());

/// Where an operation stands in the order in which this process has started those of all groups, from 1. Operations that have no order
/// with others have 0.
pub fn next_ticket() -> u64 {
    static TICKETS: AtomicU64 = AtomicU64::new(1);
    TICKETS.fetch_add(1, Ordering::Relaxed)
}

/// The shared memory of this rank, which the others open.
#[derive(Debug)]
pub struct OwnRegion(Region);

impl OwnRegion {
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
    pub fn open_others(self, rank: usize, addresses: &[String], timeout: Duration) -> io::Result<HostPeers> {
        let others = addresses.iter().enumerate().filter(|(other, _)| *other != rank);
        let mut regions = others.map(|(_, address)| Region::open(address)).collect::<io::Result<Vec<_>>>()?;
        regions.insert(rank, self.0);
        let exchange = Exchange { rank, regions, timeout, ..Exchange::default() };
        Ok(HostPeers(Arc::new(Mutex::new(exchange))))
    }
}

/// Ranks that share memory. All of them start the same sums in the same order.
#[derive(Debug)]
pub struct HostPeers(Arc<Mutex<Exchange>>);

impl HostPeers {
    /// Lets a wait for any group of this process finish the sums that were started before it here, see
    /// [`Summing::finish_before`]. This is for processes that are one rank each.
    pub fn share_order(&self) {
        let mut known = EXCHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|exchange| exchange.strong_count() > 0);
        known.push(Arc::downgrade(&self.0));
    }

    /// Changes how long this rank waits for the others.
    pub fn set_timeout(&self, timeout: Duration) {
        lock(&self.0).timeout = timeout;
    }

    /// Whether sums of such tensors go this way; the tensor must be in memory of the host, one number after the other.
    pub fn can_sum(tensor: &Tensor) -> bool {
        matches!(tensor.kind(), Kind::Float | Kind::BFloat16) && tensor.numel() > 0
    }

    /// Whether parts of such tensors are gathered this way; any dtype is.
    pub fn can_gather(part: &Tensor) -> bool {
        part.numel() > 0
    }

    /// Starts to fill `output`, contiguous, with this rank's part of the sum of `input` over all ranks, which has as many
    /// parts as there are ranks; added up as by [`HostPeers::start_sum`]. `output` may be that part of `input`. Both must be
    /// left alone until it is complete.
    ///
    /// # Errors
    /// As [`HostPeers::start_sum`].
    pub fn start_reduce_scatter(&self, output: &Tensor, input: &Tensor) -> Result<Summing, TorchError> {
        let ticket = next_ticket();
        let last = lock(&self.0).start_parts(input, Some(output), Exchanged::ReduceScatters, ticket)?;
        Ok(Summing { exchange: self.0.clone(), ticket, last })
    }

    /// Starts to fill `output` with the `input`s of all ranks in their order; both contiguous. `input` may be this rank's
    /// part of `output`.
    ///
    /// # Errors
    /// As [`HostPeers::start_sum`].
    pub fn start_all_gather(&self, output: &Tensor, input: &Tensor) -> Result<Summing, TorchError> {
        let ticket = next_ticket();
        let mut exchange = lock(&self.0);
        let len = input.numel() * input.kind().elt_size_in_bytes();
        let own = output.data_ptr().cast::<u8>().wrapping_add(exchange.rank * len);
        // SAFETY: the output has as many parts of this length as there are ranks, and the input is one.
        unsafe { input.data_ptr().cast::<u8>().copy_to(own, len) };
        let last = exchange.start_parts(output, None, Exchanged::AllGathers, ticket)?;
        drop(exchange);
        Ok(Summing { exchange: self.0.clone(), ticket, last })
    }

    /// Starts to replace a contiguous tensor of the host's memory by the sum over all ranks, added up in their order in
    /// float32. It must be left alone until the sum is complete.
    ///
    /// # Errors
    /// If a rank is gone or does not arrive within the time-out: with many sums in progress, this waits for earlier ones.
    pub fn start_sum(&self, tensor: &Tensor) -> Result<Summing, TorchError> {
        let ticket = next_ticket();
        let last = lock(&self.0).start(tensor, ticket)?;
        Ok(Summing { exchange: self.0.clone(), ticket, last })
    }
}

/// A sum in progress. Dropping it waits, too.
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
        let done = lock(&self.exchange).finish(self.last);
        note_writes();
        done
    }

    /// Finishes the sums of all groups that were started before an operation. Call it before waiting for that operation: another rank
    /// may wait for those sums first, and they need this one. A failure is returned when they are waited for themselves.
    pub fn finish_before(ticket: u64) {
        if ticket == 0 {
            return; // the thread of the sums may wait for another rank, and hold the lock meanwhile
        }
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
        let _ = lock(&self.exchange).finish(self.last); // the next wait returns a failure
    }
}

fn lock(exchange: &Mutex<Exchange>) -> MutexGuard<'_, Exchange> {
    exchange.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A piece of a tensor in progress.
#[derive(Debug)]
struct Piece {
    number: u64,
    /// Of its sum; see [`next_ticket`].
    ticket: u64,
    tensor: Tensor,
    /// Where this rank's part of the sum goes, for a reduce_scatter.
    output: Option<Tensor>,
    /// Its bytes in the tensor; in the part of each rank, if each has one.
    bytes: Range<usize>,
    /// Bytes of such a part.
    part_len: usize,
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
    /// Starts a sum. Returns the number of the last piece.
    fn start(&mut self, tensor: &Tensor, ticket: u64) -> Result<u64, TorchError> {
        self.check()?;
        let len = tensor.numel() * tensor.kind().elt_size_in_bytes();
        for first in (0..len).step_by(MAX_PIECE) {
            let bytes = first..(first + MAX_PIECE).min(len);
            let place = self.make_place(bytes.len())?;
            let filled = Filled { place, kind: tensor.kind(), what: Exchanged::Sums };
            let tensor = tensor.shallow_clone();
            let number = self.started + 1;
            self.begin(Piece { number, ticket, tensor, output: None, bytes, part_len: 0, filled });
        }
        Ok(self.started)
    }

    /// Starts an exchange of parts, of which `tensor` has one for each rank. Returns the number of the last piece.
    fn start_parts(
        &mut self,
        tensor: &Tensor,
        output: Option<&Tensor>,
        what: Exchanged,
        ticket: u64,
    ) -> Result<u64, TorchError> {
        self.check()?;
        let ranks = self.regions.len();
        let part_len = tensor.numel() * tensor.kind().elt_size_in_bytes() / ranks;
        let gathers = what == Exchanged::AllGathers;
        let step = if gathers { MAX_PIECE } else { (MAX_PIECE / ranks / LINE).max(1) * LINE };
        for first in (0..part_len).step_by(step) {
            let bytes = first..(first + step).min(part_len);
            let len = if gathers { bytes.len() } else { bytes.len().next_multiple_of(LINE) * ranks };
            let place = self.make_place(len)?;
            let filled = Filled { place, kind: if gathers { Kind::Float } else { tensor.kind() }, what };
            let (tensor, output) = (tensor.shallow_clone(), output.map(Tensor::shallow_clone));
            let number = self.started + 1;
            self.begin(Piece { number, ticket, tensor, output, bytes, part_len, filled });
        }
        Ok(self.started)
    }

    /// Writes to the ring what others take of a piece.
    fn begin(&mut self, piece: Piece) {
        let (region, ranks) = (&self.regions[self.rank], self.regions.len());
        let gathers = piece.filled.what == Exchanged::AllGathers;
        for rank in (0..ranks).filter(|rank| (*rank == self.rank) == gathers) {
            let part = piece.part(rank, ranks);
            let len = part.len();
            let ring = region.ring(within(&piece.filled.place, &part));
            // SAFETY: the piece has these bytes, and the ring has space for them that no rank reads now.
            unsafe { piece.data(rank, &part).copy_to_nonoverlapping(ring, len) };
        }
        region.set_filled(piece.number, &piece.filled);
        region.advance(Stage::Filled, piece.number);
        self.started = piece.number;
        self.open.push_back(piece);
    }

    /// Room in the ring that no rank reads any more; finishes earlier pieces if there is none.
    fn make_place(&mut self, len: usize) -> Result<Range<usize>, TorchError> {
        let taken =
            self.others().map(|rank| self.regions[rank].count(Stage::Taken)).min().unwrap_or(u64::MAX);
        while self.places.front().is_some_and(|(number, _)| *number <= taken.min(self.finished)) {
            self.places.pop_front();
        }
        if self.places.is_empty() || self.next + len > RING {
            self.next = 0; // that memory is in the caches
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
        let (number, ranks) = (piece.number, self.regions.len());
        self.wait_for_others(Stage::Filled, number)?;
        let filled: Vec<_> = self.regions.iter().map(|region| region.filled(number)).collect();
        let what = |filled: &Filled| (filled.what, filled.place.len(), filled.kind);
        if let Some(rank) = filled.iter().position(|theirs| what(theirs) != what(&piece.filled)) {
            let (theirs, own) = (describe(&filled[rank]), describe(&piece.filled));
            return Err(self.fail(format!("rank {rank} {theirs} where this rank {own}")));
        }
        match piece.filled.what {
            Exchanged::Sums => {
                self.add_own_part(piece, &filled);
                self.regions[self.rank].advance(Stage::Summed, number);
                self.wait_for_others(Stage::Summed, number)?;
                (0..ranks).for_each(|rank| self.take_part(piece, &filled, rank));
            }
            Exchanged::ReduceScatters => {
                self.add_own_part(piece, &filled);
                self.take_part(piece, &filled, self.rank);
            }
            Exchanged::AllGathers => self.others().for_each(|rank| self.take_part(piece, &filled, rank)),
        }
        self.regions[self.rank].advance(Stage::Taken, number);
        Ok(())
    }

    /// Adds up this rank's part of a piece, in its ring; `filled` is what all ranks have put into theirs.
    fn add_own_part(&self, piece: &Piece, filled: &[Filled]) {
        let ranks = self.regions.len();
        let mine = piece.part(self.rank, ranks);
        let in_ring = |rank: usize| self.regions[rank].ring(within(&filled[rank].place, &mine));
        let (dtype, bytes) = match piece.filled.kind {
            Kind::Float => (Dtype::Float32, size_of::<f32>()),
            _ => (Dtype::Bfloat16, size_of::<Bf16>()),
        };
        let len = mine.len() / bytes;
        let parts: Vec<Floats> = (0..ranks)
            .map(|rank| {
                let first = if rank == self.rank { piece.data(rank, &mine) } else { in_ring(rank) };
                // SAFETY: the piece has these numbers, and all others have written theirs and leave them alone until this
                // rank has taken all.
                unsafe { Floats::of_address(dtype, first.cast(), len) }
            })
            .collect();
        // SAFETY: no rank reads this part of the ring before it is marked as summed.
        let out = unsafe { FloatsMut::of_address(dtype, in_ring(self.rank).cast(), len) };
        add_up(&parts, out);
    }

    /// Copies the part of a piece that is in a rank's ring to where it belongs.
    fn take_part(&self, piece: &Piece, filled: &[Filled], rank: usize) {
        let part = piece.part(rank, self.regions.len());
        let ring = self.regions[rank].ring(within(&filled[rank].place, &part));
        let target = match &piece.output {
            Some(output) => output.data_ptr().cast::<u8>().wrapping_add(piece.bytes.start),
            None => piece.data(rank, &part),
        };
        // SAFETY: what is read is there, and stays until this rank has taken it; the tensor has room for it.
        unsafe { ring.copy_to_nonoverlapping(target, part.len()) };
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
    /// Bytes in the ring of the part of the piece that a rank adds up, or gives.
    fn part(&self, rank: usize, ranks: usize) -> Range<usize> {
        match self.filled.what {
            Exchanged::Sums => {
                let part = self.bytes.len().div_ceil(ranks).next_multiple_of(LINE);
                let end = |rank: usize| (rank * part).min(self.bytes.len());
                end(rank)..end(rank + 1)
            }
            Exchanged::ReduceScatters => {
                let step = self.bytes.len().next_multiple_of(LINE);
                rank * step..rank * step + self.bytes.len()
            }
            Exchanged::AllGathers => 0..self.bytes.len(),
        }
    }

    /// The address in the tensor of a rank's part.
    fn data(&self, rank: usize, part: &Range<usize>) -> *mut u8 {
        let start = match self.filled.what {
            Exchanged::Sums => part.start,
            _ => rank * self.part_len,
        };
        self.tensor.data_ptr().cast::<u8>().wrapping_add(self.bytes.start + start)
    }
}

/// What a rank does, for a message.
fn describe(filled: &Filled) -> String {
    let (len, kind) = (filled.place.len(), filled.kind);
    match filled.what {
        Exchanged::Sums => format!("sums {len} bytes of {kind:?}"),
        Exchanged::ReduceScatters => format!("reduce-scatters {len} bytes of {kind:?}"),
        Exchanged::AllGathers => format!("gathers {len} bytes"),
    }
}

/// A part of a range, counted from its start.
fn within(whole: &Range<usize>, part: &Range<usize>) -> Range<usize> {
    whole.start + part.start..whole.start + part.end
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `body` as each rank, on a thread each.
    fn as_ranks(ranks: usize, timeout: Duration, body: impl Fn(usize, HostPeers) + Sync) {
        let regions: Vec<OwnRegion> = (0..ranks).map(|_| OwnRegion::new().unwrap()).collect();
        let addresses: Vec<String> = regions.iter().map(OwnRegion::address).collect();
        std::thread::scope(|scope| {
            for (rank, home) in regions.into_iter().enumerate() {
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
            as_ranks(ranks, Duration::from_secs(60), |rank, host_peers| {
                for kind in [Kind::Float, Kind::BFloat16] {
                    for len in [1, 3, 33, 1000, 70_001] {
                        let tensor = numbers_of(rank, len, kind);
                        host_peers.start_sum(&tensor).unwrap().wait().unwrap();
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
    fn each_rank_has_its_part_of_the_sum_and_all_have_the_parts_of_all() {
        for ranks in [2, 3, 5] {
            as_ranks(ranks, Duration::from_secs(60), |rank, host_peers| {
                for (kind, len) in [(Kind::Float, 1), (Kind::BFloat16, 33), (Kind::Float, RING / 16 + 3)] {
                    let whole = numbers_of(rank, len * ranks, kind);
                    let all: Vec<_> = (0..ranks).map(|rank| numbers_of(rank, len * ranks, kind)).collect();
                    let sum = Tensor::stack(&all, 0).sum_dim_intlist(0, false, kind);
                    let own = |tensor: &Tensor| tensor.narrow(0, (rank * len) as i64, len as i64);
                    let output = own(&whole).zeros_like();
                    host_peers.start_reduce_scatter(&output, &whole).unwrap().wait().unwrap();
                    assert_eq!(output, own(&sum), "{ranks} ranks, {len}");
                    host_peers.start_reduce_scatter(&own(&whole), &whole).unwrap().wait().unwrap();
                    assert_eq!(own(&whole), own(&sum), "in place");
                    let gathered = whole.zeros_like();
                    let first = host_peers.start_all_gather(&gathered, &output).unwrap();
                    let second = host_peers.start_all_gather(&whole, &own(&whole)).unwrap();
                    second.wait().unwrap();
                    first.wait().unwrap();
                    assert_eq!(gathered, sum);
                    assert_eq!(whole, sum);
                }
            });
        }
    }

    #[test]
    fn ranks_that_do_different_things_are_told() {
        as_ranks(2, Duration::from_secs(60), |rank, host_peers| {
            let tensor = numbers_of(rank, 32, Kind::Float);
            let own = tensor.narrow(0, 16 * rank as i64, 16);
            let started = match rank {
                0 => host_peers.start_sum(&tensor),
                _ => host_peers.start_reduce_scatter(&own, &tensor),
            };
            let error = started.unwrap().wait().unwrap_err();
            let expected =
                ["rank 1 reduce-scatters 128 bytes of Float where this rank sums", "rank 0 sums 128 bytes"];
            assert!(error.message.contains(expected[rank]), "{error}");
        });
    }

    #[test]
    fn more_than_a_ring_may_be_under_way() {
        let len = RING / size_of::<f32>() / 3 + 5;
        as_ranks(2, Duration::from_secs(60), |rank, host_peers| {
            let tensors: Vec<_> = (0..5).map(|i| numbers_of(rank + i, len, Kind::Float)).collect();
            let mut sums: Vec<_> =
                tensors.iter().map(|tensor| host_peers.start_sum(tensor).unwrap()).collect();
            let small: Vec<_> = (0..200).map(|_| Tensor::from_slice(&[rank as f32 + 1.0])).collect();
            sums.extend(small.iter().map(|tensor| host_peers.start_sum(tensor).unwrap()));
            sums.into_iter().rev().for_each(|sum| sum.wait().unwrap());
            for (i, tensor) in tensors.iter().enumerate() {
                assert_eq!(tensor, &(numbers_of(i, len, Kind::Float) + numbers_of(1 + i, len, Kind::Float)));
            }
            assert!(small.iter().all(|tensor| tensor.double_value(&[]) == 3.0));
        });
    }

    #[test]
    fn a_rank_that_leaves_or_does_not_come_is_named() {
        as_ranks(3, Duration::from_millis(200), |rank, host_peers| {
            let tensor = numbers_of(rank, 100, Kind::Float);
            host_peers.start_sum(&tensor).unwrap().wait().unwrap();
            if rank == 1 {
                return;
            }
            let error = host_peers.start_sum(&tensor).unwrap().wait().unwrap_err();
            assert!(error.message.contains("rank 1 has ended or left the group"), "{error}");
            let again = host_peers.start_sum(&tensor).unwrap_err();
            assert_eq!(again.message, error.message);
        });
        as_ranks(2, Duration::from_millis(200), |rank, host_peers| {
            if rank == 1 {
                return std::thread::sleep(Duration::from_secs(1));
            }
            let error = host_peers.start_sum(&numbers_of(0, 9, Kind::Float)).unwrap().wait().unwrap_err();
            assert!(error.message.contains("timed out after 0.2 s of waiting for rank 1"), "{error}");
            drop(host_peers);
        });
    }

    #[test]
    fn ranks_that_sum_different_tensors_are_told() {
        for tensors in [[(10, Kind::Float), (11, Kind::Float)], [(10, Kind::Float), (20, Kind::BFloat16)]] {
            as_ranks(2, Duration::from_secs(60), |rank, host_peers| {
                let (len, kind) = tensors[rank];
                let error = host_peers.start_sum(&numbers_of(rank, len, kind)).unwrap().wait().unwrap_err();
                let what = tensors
                    .map(|(len, kind)| format!("{} bytes of {kind:?}", len * kind.elt_size_in_bytes()));
                let expected =
                    format!("rank {} sums {} where this rank sums {}", 1 - rank, what[1 - rank], what[rank]);
                assert!(error.message.contains(&expected), "{error}");
            });
        }
    }
}
