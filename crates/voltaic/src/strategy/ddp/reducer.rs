//! Averages gradients bucket by bucket while backward computes the next ones.
//!
//! A hook on each parameter runs when its gradient is complete. When all gradients of a bucket are, they are written into it, each
//! divided by the number of ranks, and its all_reduce starts; buckets start in the same order on all ranks, whatever the order of the
//! hooks. The same arithmetic as PyTorch's `DistributedDataParallel`: sum of `grad * (1 / world_size)`.

use std::sync::Arc;

use tch::{Kind, Tensor};

use super::bucket::{Bucket, assign};
use crate::distributed::{ProcessGroup, ReduceOp, Work, collective_scope};
use crate::error::{ConfigError, DistributedError, Error, Result};
use crate::ffi;
use crate::strategy::config::{DdpConfig, GradientCompression};
use crate::strategy::peers::SentVotes;
use crate::strategy::sparse;
use crate::strategy::votes::Votes;

/// A bucket that is being reduced.
#[derive(Debug)]
struct Sent {
    work: Work,
    /// What travels, if not the bucket itself.
    compressed: Option<Tensor>,
}

/// Where a parameter's gradient goes.
#[derive(Debug, Clone, Copy)]
struct Place {
    bucket: usize,
    is_ready: bool,
}

#[derive(Debug)]
pub(super) struct Reducer {
    /// Ranks with other batches.
    group: Arc<ProcessGroup>,
    /// All ranks, which act on votes together.
    all: Arc<ProcessGroup>,
    config: DdpConfig,
    names: Vec<String>,
    params: Vec<Tensor>,
    places: Vec<Place>,
    buckets: Vec<Bucket>,
    /// For each bucket, how many of its gradients are still to come.
    waiting: Vec<usize>,
    sent: Vec<Sent>,
    /// Hooks count: this backward is one that averages.
    pub is_active: bool,
    /// The trainer runs backward, whether it averages or not.
    pub is_in_backward: bool,
    /// A parameter that got a gradient from elsewhere since the last backward that averages.
    pub own_backward: Option<usize>,
    /// The order in which gradients came in the first backward that averages, until buckets are made after it.
    learnt: Option<Vec<usize>>,
    /// Which parameters have a part in every loss, once `static_graph` has found out.
    reached: Option<Vec<bool>>,
    /// Which have one on any rank; kept as long as `reached`.
    reached_anywhere: Option<Vec<bool>>,
    /// Which have had a gradient of this rank's alone since gradients were averaged last.
    used: Vec<bool>,
    /// Gradients that parameters without a part in this rank's loss had before.
    before: Vec<(usize, Tensor)>,
    /// This rank's votes, sent behind the buckets: before them, a rank would be woken for them and then wait for the buckets.
    votes: Votes,
    /// Why a hook failed.
    pub failure: Option<Error>,
}

impl Reducer {
    /// For the trainable parameters of a module, by fqn.
    /// Gradients are averaged over `group`, votes exchanged with `all`.
    pub fn new(
        (group, all): (Arc<ProcessGroup>, Arc<ProcessGroup>),
        config: DdpConfig,
        params: Vec<(String, Tensor)>,
    ) -> Result<Self> {
        let (names, params): (Vec<_>, Vec<_>) = params.into_iter().unzip();
        let backwards: Vec<usize> = (0..params.len()).rev().collect();
        // an order can be learnt only if all gradients come each time
        let learns = !config.find_unused_parameters || config.static_graph;
        let mut reducer = Self {
            group,
            all,
            config,
            names,
            places: vec![Place { bucket: 0, is_ready: false }; params.len()],
            used: vec![false; params.len()],
            params,
            buckets: Vec::new(),
            waiting: Vec::new(),
            sent: Vec::new(),
            is_active: false,
            is_in_backward: false,
            own_backward: None,
            learnt: learns.then(Vec::new),
            reached: None,
            reached_anywhere: None,
            before: Vec::new(),
            votes: Votes::default(),
            failure: None,
        };
        reducer.make_buckets(&backwards)?;
        Ok(reducer)
    }

    pub fn params(&self) -> &[Tensor] {
        &self.params
    }

    fn make_buckets(&mut self, order: &[usize]) -> Result<()> {
        let sizes: Vec<(Kind, usize)> = self
            .params
            .iter()
            .map(|param| (param.kind(), param.numel() * param.kind().elt_size_in_bytes()))
            .collect();
        let cap_bytes = self.config.bucket_cap_mb as usize * (1 << 20);
        self.buckets.clear();
        for (number, members) in assign(&sizes, order, cap_bytes).into_iter().enumerate() {
            for &index in &members {
                self.places[index].bucket = number;
            }
            self.buckets.push(Bucket::new(members, &self.params, &self.names)?);
        }
        Ok(())
    }

    fn begin_sending(&mut self, votes: Votes) {
        self.failure = None;
        self.sent.clear();
        self.is_active = true;
        self.own_backward = None; // it averages what there is already, too
        self.waiting = self.buckets.iter().map(|bucket| bucket.params.len()).collect();
        self.places.iter_mut().for_each(|place| place.is_ready = false);
        self.votes = votes;
    }

    /// In place of a backward that averages, where this rank has no loss: other ranks may have one. Gradients of the batches of a
    /// window before it are averaged; parameters without them on any rank keep what they have.
    pub fn without_loss(&mut self, votes: Votes) -> Result<Votes> {
        let learnt = self.learnt.take(); // not the order of gradients
        self.begin_sending(Votes { without_loss: 1, ..votes });
        self.is_in_backward = true;
        let mut before = Vec::with_capacity(self.params.len());
        for index in 0..self.params.len() {
            let grad = self.params[index].grad();
            before.push(if grad.defined() { grad.copy() } else { grad });
            self.ready(index)?;
        }
        (self.is_in_backward, self.is_active) = (false, false);
        let votes = self.receive();
        self.learnt = learnt;
        let used = match &votes {
            Ok(_) => self.anywhere(&self.used)?,
            Err(_) => vec![false; self.params.len()],
        };
        let kept = self.params.iter().zip(before).zip(used).filter(|(_, used)| !used);
        for ((param, grad), _) in kept {
            if grad.defined() { ffi::set_grad(param, &grad)? } else { ffi::clear_grads([param])? }
        }
        self.used.fill(false);
        votes
    }

    /// Before a backward from `loss` that averages.
    pub fn begin(&mut self, loss: &Tensor, votes: Votes) -> Result<()> {
        self.begin_sending(votes);
        if self.config.find_unused_parameters || self.config.static_graph {
            let mut reached = match self.reached.take() {
                Some(reached) => reached,
                None => ffi::reached_leaves(loss, &self.params)?,
            };
            self.before.clear();
            for index in (0..self.params.len()).filter(|&index| !reached[index]) {
                self.ready_without_grad(index)?;
            }
            if !self.config.static_graph {
                reached.iter_mut().zip(&self.used).for_each(|(reached, used)| *reached |= used);
            }
            self.reached = Some(reached);
        }
        Ok(())
    }

    /// The loss gives no gradient for a parameter: zeros are sent, or what an accumulation window holds of it.
    fn ready_without_grad(&mut self, index: usize) -> Result<()> {
        if !self.used[index] {
            let grad = self.params[index].grad();
            self.before.push((index, if grad.defined() { grad.copy() } else { grad }));
        }
        self.ready(index)
    }

    /// A gradient is complete.
    pub fn ready(&mut self, index: usize) -> Result<()> {
        if !self.is_in_backward {
            self.own_backward.get_or_insert(index);
        }
        if !self.is_active {
            self.used[index] = true;
            return Ok(());
        }
        if std::mem::replace(&mut self.places[index].is_ready, true) {
            return Ok(());
        }
        if let Some(order) = &mut self.learnt {
            order.push(index);
        }
        self.waiting[self.places[index].bucket] -= 1;
        while self.sent.len() < self.buckets.len() && self.waiting[self.sent.len()] == 0 {
            let sent = self.send(&self.buckets[self.sent.len()])?;
            self.sent.push(sent);
        }
        Ok(())
    }

    /// Parameters that have gradients of an open window.
    pub fn used(&self) -> Vec<&str> {
        let used = self.names.iter().zip(&self.used).filter(|(_, used)| **used);
        used.map(|(name, _)| name.as_str()).collect()
    }

    /// These parameters have gradients of an open window.
    pub fn note_used(&mut self, names: &[&str]) {
        let known = self.used.iter_mut().zip(&self.names);
        known.filter(|(_, name)| names.contains(&name.as_str())).for_each(|(used, _)| *used = true);
    }

    /// An error if gradients came from a backward pass that was not the trainer's, and are this rank's alone.
    pub fn check_averaged(&self) -> Result<()> {
        let Some(name) = self.own_backward.and_then(|index| self.names.get(index)) else {
            return Ok(());
        };
        let what = format!("the gradient of `{name}` comes from loss.backward(), and is this rank's alone");
        let remedy =
            "call ctx.manual_backward(&loss), or backward of Fabric, which average gradients over the ranks";
        Err(ConfigError::new("optimizer.step", what, remedy).into())
    }

    /// Writes the gradients of a bucket into it, each times `scale`.
    fn fill(&self, bucket: &Bucket, scale: f64) -> Result<()> {
        let params = || bucket.params.iter().map(|&index| &self.params[index]);
        ffi::fill_bucket(params(), &bucket.views, scale).map_err(|error| {
            let names = bucket.params.iter().map(|&index| self.names[index].as_str());
            sparse::explain(error, "ddp", names.zip(params()))
        })
    }

    fn send(&self, bucket: &Bucket) -> Result<Sent> {
        let _named = collective_scope(&bucket.name);
        let params = || bucket.params.iter().map(|&index| &self.params[index]);
        let share = 1.0 / self.group.world_size() as f64;
        if self.config.gradient_compression == GradientCompression::Bf16 {
            self.fill(bucket, 1.0)?;
            ffi::adopt_grads(params(), &bucket.views)?;
            let _no_grad = tch::no_grad_guard();
            let compressed =
                bucket.flat.f_to_kind(Kind::BFloat16)?.f_div_scalar(self.group.world_size() as f64)?;
            let work = self.group.start_all_reduce(&compressed, ReduceOp::Sum)?;
            return Ok(Sent { work, compressed: Some(compressed) });
        }
        self.fill(bucket, share)?;
        ffi::adopt_grads(params(), &bucket.views)?;
        Ok(Sent { work: self.group.start_all_reduce(&bucket.flat, ReduceOp::Sum)?, compressed: None })
    }

    /// After backward: waits for the buckets. Returns the votes of all ranks.
    pub fn finish(&mut self) -> Result<Votes> {
        self.take_ungiven()?;
        let rank = self.all.rank();
        if self.sent.len() < self.buckets.len() {
            let absent = self.places.iter().zip(&self.names).filter(|(place, _)| !place.is_ready);
            let names = absent.map(|(_, name)| name.clone()).collect();
            return Err(DistributedError::UnusedParameters { rank, names }.into());
        }
        let votes = self.receive()?;
        self.restore_unused()?;
        self.used.fill(false);
        self.learn()?;
        Ok(votes)
    }

    /// Parameters that the loss reaches, and that got no gradient from it, as those of experts in a module with hooks: they take no
    /// part in it. Of a static graph that is known after the first step.
    fn take_ungiven(&mut self) -> Result<()> {
        if self.reached_anywhere.is_some() {
            return Ok(());
        }
        let Some(mut reached) = self.reached.take() else { return Ok(()) };
        (self.is_in_backward, self.is_active) = (true, true);
        for index in (0..self.params.len()).filter(|&index| !self.places[index].is_ready).collect::<Vec<_>>()
        {
            reached[index] = self.used[index];
            self.ready_without_grad(index)?;
        }
        (self.is_in_backward, self.is_active) = (false, false);
        self.reached = Some(reached);
        Ok(())
    }

    /// Waits for the buckets, and takes the votes of all ranks.
    fn receive(&mut self) -> Result<Votes> {
        let votes = SentVotes::start(&self.all, self.votes)?;
        for (bucket, Sent { work, compressed }) in self.buckets.iter().zip(self.sent.drain(..)) {
            work.wait()?;
            if let Some(compressed) = compressed {
                let _no_grad = tch::no_grad_guard();
                bucket.flat.shallow_clone().f_copy_(&compressed)?;
            }
        }
        votes.receive()
    }

    /// Parameters without a part in the loss of any rank keep the gradient they had, mostly none, so that the optimizer
    /// leaves them alone.
    fn restore_unused(&mut self) -> Result<()> {
        let Some(reached) = &self.reached else { return Ok(()) };
        let anywhere = match self.reached_anywhere.take() {
            Some(anywhere) => anywhere,
            None => self.anywhere(reached)?,
        };
        for (index, grad) in self.before.drain(..).filter(|(index, _)| !anywhere[*index]) {
            let param = &self.params[index];
            if grad.defined() { ffi::set_grad(param, &grad)? } else { ffi::clear_grads([param])? }
        }
        self.reached_anywhere = Some(anywhere);
        Ok(())
    }

    /// For each parameter, whether that is so on any rank.
    fn anywhere(&self, own: &[bool]) -> Result<Vec<bool>> {
        let own: Vec<i32> = own.iter().map(|&own| i32::from(own)).collect();
        let any = Tensor::f_from_slice(&own)?;
        let _named = collective_scope("unused parameters");
        self.group.all_reduce(&any, ReduceOp::Max)?;
        Ok(Vec::<i32>::try_from(&any)?.into_iter().map(|any| any != 0).collect())
    }

    /// Makes buckets in the order in which rank 0's gradients came.
    fn learn(&mut self) -> Result<()> {
        if !self.config.static_graph {
            (self.reached, self.reached_anywhere) = (None, None); // they are of one loss
        }
        let Some(order) = self.learnt.take() else { return Ok(()) };
        let _named = collective_scope("order of gradients");
        let order: Vec<usize> = self.group.broadcast_object(&order, 0)?;
        self.make_buckets(&order) // gradients of this step stay views of the old ones until the next
    }
}
