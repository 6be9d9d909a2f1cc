//! Recurrent layers: Elman's, gated recurrent units, and long short-term memory.

use std::fmt;

use tch::Tensor;

use crate::config::setters;
use crate::error::{ModuleError, Problem, Result};
use crate::nn::calls::call::{within_call, within_call_of};
use crate::nn::check::{at_least, empty, probability};
use crate::nn::field::Field;
use crate::nn::init;
use crate::nn::misfit::note_misfit;
use crate::nn::module::{Forward, Member, Module};
use crate::nn::parameter::Parameter;

/// Sequences of different lengths, without padding: the first elements of all, then the second elements of those that have one, and
/// so on, the longest sequence first. Source: `torch.nn.utils.rnn.PackedSequence`.
///
/// ```
/// use voltaic::nn::{Lstm, PackedSequence};
/// use voltaic::{Kind, Tensor};
///
/// # fn main() -> voltaic::Result<()> {
/// let padded = Tensor::ones([3, 5, 8], (Kind::Float, tch::Device::Cpu)); // [batch, time, features]
/// let packed = PackedSequence::pack(&padded, &[2, 5, 4], true)?;
/// let lstm = Lstm::builder(8, 16).batch_first(true).build()?;
/// let (output, _state) = lstm.run_packed(&packed, None)?;
/// let (padded, lengths) = output.pad(true, 0.0)?;
/// assert_eq!((padded.size(), lengths), (vec![3, 5, 16], vec![2, 5, 4]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PackedSequence {
    /// Shape `[sum of lengths, features]`.
    pub data: Tensor,
    /// How many sequences have an element at each time, int64 `[longest]`, on the CPU.
    pub batch_sizes: Tensor,
    /// The place of each packed sequence in the order that was given, int64 `[batch]`, on the data's device.
    pub sorted_indices: Tensor,
    /// The place that each given sequence has among the packed ones.
    pub unsorted_indices: Tensor,
}

impl PackedSequence {
    /// Packs padded sequences `[time, batch, features]`, or `[batch, time, features]` with `batch_first`, of these lengths, in any order.
    /// Source: `torch.nn.utils.rnn.pack_padded_sequence` with `enforce_sorted=False`.
    ///
    /// # Errors
    /// [`ModuleError::Input`] unless there is a length for each sequence, from 1 to the padded length.
    pub fn pack(input: &Tensor, lengths: &[i64], batch_first: bool) -> Result<Self> {
        let shape = input.size();
        let (batch, time) = match (&shape[..], batch_first) {
            ([batch, time, _], true) | ([time, batch, _], false) => (*batch, *time),
            _ => {
                let expected = "three dimensions are needed".to_owned();
                return Err(ModuleError::Shape { layer: "PackedSequence".to_owned(), shape, expected }.into());
            }
        };
        if lengths.len() as i64 != batch || !lengths.iter().all(|length| (1..=time).contains(length)) {
            let what = format!("lengths {lengths:?} of sequences in {shape:?}");
            let remedy = format!("give {batch} lengths from 1 to {time}");
            let problem = Problem::new(what, remedy);
            return Err(ModuleError::Input { layer: "PackedSequence".to_owned(), problem }.into());
        }
        let mut order: Vec<i64> = (0..batch).collect();
        order.sort_by_key(|&sequence| std::cmp::Reverse(lengths[sequence as usize]));
        let sorted: Vec<i64> = order.iter().map(|&sequence| lengths[sequence as usize]).collect();
        let sorted_indices = Tensor::f_from_slice(&order)?.f_to_device(input.device())?;
        let by_length = input.f_index_select(if batch_first { 0 } else { 1 }, &sorted_indices)?;
        let (data, batch_sizes) =
            by_length.f_internal_pack_padded_sequence(&Tensor::f_from_slice(&sorted)?, batch_first)?;
        Ok(Self { data, batch_sizes, unsorted_indices: sorted_indices.f_argsort(0, false)?, sorted_indices })
    }

    /// The sequences in the order that was given, padded with a value to the longest, and their lengths. Source:
    /// `torch.nn.utils.rnn.pad_packed_sequence`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn pad(&self, batch_first: bool, padding_value: f64) -> Result<(Tensor, Vec<i64>)> {
        let longest = self.batch_sizes.size()[0];
        let (padded, lengths) = Tensor::f_internal_pad_packed_sequence(
            &self.data,
            &self.batch_sizes,
            batch_first,
            padding_value,
            longest,
        )?;
        let padded = padded.f_index_select(if batch_first { 0 } else { 1 }, &self.unsorted_indices)?;
        let lengths = lengths.f_index_select(0, &self.unsorted_indices.f_to_device(tch::Device::Cpu)?)?;
        Ok((padded, Vec::<i64>::try_from(&lengths)?))
    }

    /// The same sequences with other data.
    fn with_data(&self, data: Tensor) -> Self {
        Self {
            data,
            batch_sizes: self.batch_sizes.shallow_clone(),
            sorted_indices: self.sorted_indices.shallow_clone(),
            unsorted_indices: self.unsorted_indices.shallow_clone(),
        }
    }
}

/// The weights of a recurrent layer under PyTorch's names, in libtorch's order: `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`,
/// `bias_hh_l0`, those of the reverse direction with `_reverse`, then those of the next layer.
#[derive(Debug)]
struct Weights(Vec<(String, Parameter)>);

impl Field for Weights {
    fn members<'a>(&'a self, _: &str, visit: &mut dyn FnMut(&str, Member<'a>)) {
        for (name, parameter) in &self.0 {
            visit(name, Member::Parameter(parameter));
        }
    }

    fn children_mut<'a>(&'a mut self, _: &str, _: &mut dyn FnMut(&str, &'a mut dyn Module)) {}
}

impl Weights {
    /// Drawn uniformly within `1 / sqrt(hidden_size)`, in PyTorch's order.
    fn new(options: &RecurrentBuilder, gates: i64) -> Result<Self> {
        let RecurrentBuilder { input_size, hidden_size, num_layers, bias, bidirectional, .. } = *options;
        let directions: &[&str] = if bidirectional { &["", "_reverse"] } else { &[""] };
        let rows = gates * hidden_size;
        let mut weights = Vec::new();
        for layer in 0..num_layers {
            let columns = if layer == 0 { input_size } else { hidden_size * directions.len() as i64 };
            for direction in directions {
                let mut add = |name: &str, shape: &[i64]| -> Result<()> {
                    weights.push((format!("{name}_l{layer}{direction}"), Parameter::new(empty(shape)?)));
                    Ok(())
                };
                add("weight_ih", &[rows, columns])?;
                add("weight_hh", &[rows, hidden_size])?;
                if bias {
                    add("bias_ih", &[rows])?;
                    add("bias_hh", &[rows])?;
                }
            }
        }
        let bound = 1.0 / (hidden_size as f64).sqrt();
        weights.iter().try_for_each(|(_, weight)| init::uniform_(weight, -bound, bound))?;
        Ok(Self(weights))
    }

    fn tensors(&self) -> Result<Vec<Tensor>> {
        self.0.iter().map(|(_, parameter)| Ok(parameter.try_tensor()?.shallow_clone())).collect()
    }
}

/// Options of a recurrent layer; the layer's type says what `build` makes.
#[derive(Debug, Clone, Copy)]
struct RecurrentBuilder {
    input_size: i64,
    hidden_size: i64,
    num_layers: i64,
    bias: bool,
    batch_first: bool,
    dropout: f64,
    bidirectional: bool,
}

impl RecurrentBuilder {
    fn new(input_size: i64, hidden_size: i64) -> Self {
        let (num_layers, bias, batch_first, dropout, bidirectional) = (1, true, false, 0.0, false);
        Self { input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional }
    }

    fn check(&self, layer: &'static str) -> Result<()> {
        let sizes = [
            ("input_size", &[self.input_size][..]),
            ("hidden_size", &[self.hidden_size]),
            ("num_layers", &[self.num_layers]),
        ];
        at_least(layer, 1, sizes)?;
        probability(layer, self.dropout)
    }
}

/// A recurrent layer whose state is `$states` tensors, each `[num_layers * directions, batch, hidden_size]`.
macro_rules! recurrent {
    (
        $(#[$doc:meta])*
        $layer:ident, $builder:ident, gates $gates:literal, states $states:literal ($($state:ident),+) as $state_type:ty,
        $by_batch:ident, $by_steps:ident
    ) => {
        $(#[$doc])*
        #[derive(Module)]
        pub struct $layer {
            weights: Weights,
            input_size: i64,
            hidden_size: i64,
            num_layers: i64,
            bias: bool,
            batch_first: bool,
            dropout: f64,
            bidirectional: bool,
            #[module(training)]
            training: bool,
        }

        #[doc = concat!("Options of [`", stringify!($layer), "`].")]
        #[derive(Debug, Clone)]
        #[must_use = "a builder does nothing until build()"]
        pub struct $builder(RecurrentBuilder);

        impl $builder {
            setters! {
                in 0;
                /// Layers on top of each other (default 1).
                num_layers: i64;
                /// Whether there are biases (default `true`).
                bias: bool;
                /// Whether input and output are `[batch, time, features]`, not `[time, batch, features]` (default `false`).
                batch_first: bool;
                /// Probability with which outputs of all layers but the last are dropped in training (default 0).
                dropout: f64;
                /// Whether the sequence is read from its end, too; outputs of both directions stand side by side (default `false`).
                bidirectional: bool;
            }

            /// Makes the layer, with weights drawn uniformly within `1 / sqrt(hidden_size)`.
            ///
            /// # Errors
            /// [`ModuleError::Sizes`] if a size is below 1, or `dropout` is no probability.
            pub fn build(self) -> Result<$layer> {
                self.0.check(stringify!($layer))?;
                let weights = Weights::new(&self.0, $gates)?;
                let RecurrentBuilder {
                    input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
                } = self.0;
                Ok($layer {
                    weights, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
                    training: true,
                })
            }
        }

        impl $layer {
            /// One layer in one direction, with biases.
            ///
            /// # Errors
            /// [`ModuleError::Sizes`] if a size is below 1.
            pub fn new(input_size: i64, hidden_size: i64) -> Result<Self> {
                Self::builder(input_size, hidden_size).build()
            }

            /// A layer with options.
            pub fn builder(input_size: i64, hidden_size: i64) -> $builder {
                $builder(RecurrentBuilder::new(input_size, hidden_size))
            }

            /// Outputs of the last layer at each time, `[time, batch, directions * hidden_size]` or with the batch first, and the
            /// state after the last, of each layer and direction `[num_layers * directions, batch, hidden_size]`. Begins with
            /// `state`, or zeros.
            ///
            /// # Errors
            /// [`ModuleError::Shape`] if the input or the state does not fit.
            pub fn run(&self, input: &Tensor, state: Option<&$state_type>) -> Result<(Tensor, $state_type)> {
                let batch = match (&input.size()[..], self.batch_first) {
                    ([batch, _, size], true) | ([_, batch, size], false) if *size == self.input_size => *batch,
                    _ => {
                        let dims = if self.batch_first { "[batch, time" } else { "[time, batch" };
                        return self.misfit(input, format!("{dims}, {}] is needed", self.input_size));
                    }
                };
                let [$($state),+] = self.initial(state, batch, input)?;
                let [output, $($state),+] = within_call_of(self, [input, $(&$state),+], |[input, $($state),+]| {
                    let weights = self.weights.tensors()?;
                    let (output, $($state),+) = input.$by_batch(
                        recurrent!(@argument $($state),+),
                        &weights,
                        self.bias,
                        self.num_layers,
                        self.active_dropout(),
                        self.training,
                        self.bidirectional,
                        self.batch_first,
                    )?;
                    Ok([output, $($state),+])
                })?;
                Ok((output, recurrent!(@state $($state),+)))
            }

            /// The same for sequences of different lengths; the state is that after the last element of each, in the order that was
            /// given to [`PackedSequence::pack`].
            ///
            /// # Errors
            /// [`ModuleError::Shape`] if the input or the state does not fit.
            pub fn run_packed(
                &self,
                input: &PackedSequence,
                state: Option<&$state_type>,
            ) -> Result<(PackedSequence, $state_type)> {
                if input.data.size().last() != Some(&self.input_size) {
                    return self.misfit(&input.data, format!("last dimension must be {}", self.input_size));
                }
                let states = self.initial(state, input.sorted_indices.size()[0], &input.data)?;
                let sorted = |state: Tensor, order: &Tensor| state.f_index_select(1, order);
                let [$($state),+] = states.map(|state| sorted(state, &input.sorted_indices));
                let [$($state),+] = [$($state?),+];
                let [data, $($state),+] = within_call_of(
                    self,
                    [&input.data, &input.batch_sizes, $(&$state),+],
                    |[data, sizes, $($state),+]| {
                        let weights = self.weights.tensors()?;
                        let (output, $($state),+) = Tensor::$by_steps(
                            data,
                            sizes,
                            recurrent!(@argument $($state),+),
                            &weights,
                            self.bias,
                            self.num_layers,
                            self.active_dropout(),
                            self.training,
                            self.bidirectional,
                        )?;
                        Ok([output, $($state),+])
                    },
                )?;
                let [$($state),+] = [$($state),+].map(|state| sorted(state, &input.unsorted_indices));
                let [$($state),+] = [$($state?),+];
                Ok((input.with_data(data), recurrent!(@state $($state),+)))
            }

            fn misfit<T>(&self, input: &Tensor, expected: String) -> Result<T> {
                note_misfit(self);
                Err(ModuleError::Shape { layer: format!("{self:?}"), shape: input.size(), expected }.into())
            }

            /// The state to begin with.
            fn initial(&self, state: Option<&$state_type>, batch: i64, input: &Tensor) -> Result<[Tensor; $states]> {
                let directions = if self.bidirectional { 2 } else { 1 };
                let shape = [self.num_layers * directions, batch, self.hidden_size];
                let Some(recurrent!(@state $($state),+)) = state else {
                    let options = (input.f_kind()?, input.device());
                    let zeros = Tensor::f_zeros(shape, options)?;
                    return Ok([(); $states].map(|()| zeros.shallow_clone()));
                };
                let states = [$($state),+];
                if let Some(wrong) = states.iter().find(|state| state.size() != shape) {
                    return self.misfit(wrong, format!("a state of {shape:?} is needed"));
                }
                Ok(states.map(Tensor::shallow_clone))
            }

            /// Where layers drop what they hand on.
            fn active_dropout(&self) -> f64 {
                if self.num_layers > 1 { self.dropout } else { 0.0 }
            }
        }

        /// The outputs alone, from a state of zeros: see `run`.
        impl Forward for $layer {
            fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
                within_call(self, input, |input| Ok(self.run(input, None)?.0))
            }
        }

        impl fmt::Debug for $layer {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({}, {}", stringify!($layer), self.input_size, self.hidden_size)?;
                if self.num_layers > 1 {
                    write!(f, ", num_layers={}", self.num_layers)?;
                }
                let flags =
                    [(!self.bias, "bias=false"), (self.batch_first, "batch_first=true"), (self.bidirectional, "bidirectional=true")];
                flags.iter().filter(|(is_set, _)| *is_set).try_for_each(|(_, text)| write!(f, ", {text}"))?;
                if self.dropout > 0.0 {
                    write!(f, ", dropout={}", self.dropout)?;
                }
                f.write_str(")")
            }
        }
    };
    (@state $state:ident) => { $state };
    (@argument $state:ident) => { $state };
    (@argument $($state:ident),+) => { &[$($state.shallow_clone()),+] };
    (@state $($state:ident),+) => { ($($state),+) };
}

recurrent! {
    /// Elman's recurrent layer `h_t = tanh(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)`, as `torch.nn.RNN`
    /// ([Elman, 1990](https://doi.org/10.1207/s15516709cog1402_1)).
    ///
    /// As a layer it maps `[time, batch, input_size]` to the outputs `[time, batch, directions * hidden_size]`;
    /// [`Rnn::run`] takes and gives the state too.
    Rnn, RnnBuilder, gates 1, states 1 (h) as Tensor, f_rnn_tanh, f_rnn_tanh_data
}

recurrent! {
    /// Gated recurrent units, as `torch.nn.GRU` ([Cho et al., 2014](https://arxiv.org/abs/1406.1078)).
    ///
    /// As a layer it maps `[time, batch, input_size]` to the outputs `[time, batch, directions * hidden_size]`;
    /// [`Gru::run`] takes and gives the state too.
    Gru, GruBuilder, gates 3, states 1 (h) as Tensor, f_gru, f_gru_data
}

recurrent! {
    /// Long short-term memory, as `torch.nn.LSTM`
    /// ([Hochreiter and Schmidhuber, 1997](https://doi.org/10.1162/neco.1997.9.8.1735)). Its state is `(h, c)`.
    ///
    /// As a layer it maps `[time, batch, input_size]` to the outputs `[time, batch, directions * hidden_size]`;
    /// [`Lstm::run`] takes and gives the state too.
    ///
    /// ```
    /// use voltaic::nn::{Forward, Lstm};
    /// use voltaic::{Kind, Tensor};
    ///
    /// # fn main() -> anyhow::Result<()> {
    /// let lstm = Lstm::builder(8, 16).num_layers(2).bidirectional(true).batch_first(true).build()?;
    /// let input = Tensor::ones([3, 5, 8], (Kind::Float, tch::Device::Cpu));
    /// assert_eq!(lstm.forward(&input)?.size(), [3, 5, 32]);
    /// let (output, (h, c)) = lstm.run(&input, None)?;
    /// assert_eq!((output.size(), h.size(), c.size()), (vec![3, 5, 32], vec![4, 3, 16], vec![4, 3, 16]));
    /// # Ok(())
    /// # }
    /// ```
    Lstm, LstmBuilder, gates 4, states 2 (h, c) as (Tensor, Tensor), f_lstm, f_lstm_data
}
