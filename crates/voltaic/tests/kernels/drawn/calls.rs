//! One call after another, in drawn modes of libtorch, and which rows of the tables they were by.

use std::collections::BTreeMap;

use tch::{Kind, TchError, Tensor};
use voltaic::ffi::{DeterministicMode, InferenceMode, set_deterministic};
use voltaic::kernels::{Machine, rows};

use super::draw::{Among, Draw};
use super::rows::keys;
use crate::beside::{Both, Results};

/// The results of drawn calls.
pub struct Calls {
    pub draw: Draw,
    pub results: Results,
    /// By the key of a row, how many calls were by it.
    pub chosen: BTreeMap<String, u32>,
    /// How many calls there were, whatever became of them.
    count: u32,
}

pub type Outputs = Result<Vec<Tensor>, TchError>;

impl Calls {
    pub fn new(seed: u64) -> Self {
        Self { draw: Draw::new(seed), results: Results::new(), chosen: BTreeMap::new(), count: 0 }
    }

    /// Notes that a call was by the first row of this name that is in force.
    pub fn note(&mut self, name: &str) {
        let machine = Machine::here();
        let in_force = keys().into_iter().zip(rows()).find(|(key, row)| {
            key.rsplit_once(" #").is_some_and(|(key, _)| key == name) && row.serves(&machine)
        });
        if let Some((key, _)) = in_force {
            *self.chosen.entry(key).or_default() += 1;
        }
    }

    /// A name that no other call has.
    fn count(&mut self, name: &str) -> String {
        self.count += 1;
        format!("{} {name}", self.count)
    }

    pub fn push(&mut self, name: &str, result: Result<Tensor, TchError>) {
        let message = |error: TchError| error.to_string().lines().next().unwrap_or_default().to_owned();
        self.results.push((name.to_owned(), result.map_err(message)));
    }

    /// Calls an operator in one of libtorch's modes, and asks for its gradients if it has any.
    pub fn call(&mut self, name: &str, inputs: &[&Tensor], f: impl Fn(&[Tensor]) -> Outputs) {
        let name = &self.count(name);
        let mut draw = self.draw.another();
        match draw.between(0, 7) {
            0 => {
                let inputs: Vec<Tensor> = inputs.iter().map(|x| x.detach()).collect();
                let outputs = InferenceMode::enter().map(|_mode| f(&inputs)).unwrap();
                self.push_all(&format!("{name}, in inference mode"), outputs);
            }
            1 | 2 => {
                set_deterministic(DeterministicMode::Error).unwrap();
                self.with_grads(&mut draw, &format!("{name}, deterministic"), inputs, &f);
                set_deterministic(DeterministicMode::Off).unwrap();
            }
            3 => self.with_second(&mut draw, &format!("{name}, twice"), inputs, &f),
            _ => self.with_grads(&mut draw, name, inputs, &f),
        }
    }

    fn push_all(&mut self, name: &str, outputs: Outputs) {
        match outputs {
            Ok(outputs) => {
                for (i, output) in outputs.into_iter().enumerate().filter(|(_, output)| output.defined()) {
                    self.push(&format!("{name}, output {i}"), Ok(output.detach()));
                }
            }
            Err(error) => self.push(name, Err(error)),
        }
    }

    fn with_grads(
        &mut self,
        draw: &mut Draw,
        name: &str,
        inputs: &[&Tensor],
        f: &impl Fn(&[Tensor]) -> Outputs,
    ) {
        let leaves: Vec<Tensor> = inputs.iter().map(|x| x.detach().set_requires_grad(true)).collect();
        let outputs = f(&leaves);
        let first = outputs.as_ref().ok().map(|outputs| outputs[0].shallow_clone());
        self.push_all(name, outputs);
        let Some(output) = first.filter(Tensor::requires_grad) else { return };
        let (layout, grad) = draw.tensor(&output.size(), output.kind(), Among::Finite);
        let name = format!("{name}, {layout} gradient");
        match voltaic::ffi::autograd_grad(&[output], &[grad], &leaves) {
            Ok(grads) => self.push_all(&name, Ok(grads.into_iter().flatten().collect())),
            Err(error) => {
                self.results.push((format!("{} {name}", self.results.len()), Err(error.to_string())))
            }
        }
    }

    /// The gradient of a gradient by an uneven weight.
    fn with_second(
        &mut self,
        draw: &mut Draw,
        name: &str,
        inputs: &[&Tensor],
        f: &impl Fn(&[Tensor]) -> Outputs,
    ) {
        let leaves: Vec<Tensor> = inputs.iter().map(|x| x.detach().set_requires_grad(true)).collect();
        let mut second = || -> Outputs {
            let output = f(&leaves)?.swap_remove(0);
            let (_, weight) = draw.tensor(&output.size(), output.kind(), Among::Finite);
            let sum = output.f_mul(&weight)?.f_sum(Kind::Float)?;
            if !sum.requires_grad() {
                return Ok(vec![]); // of integers
            }
            let firsts = Tensor::f_run_backward(&[sum], &leaves[..1], true, true)?;
            let (_, weight) = draw.tensor(&firsts[0].size(), firsts[0].kind(), Among::Finite);
            let sum = firsts[0].f_mul(&weight)?.f_sum(Kind::Float)?;
            if !sum.requires_grad() {
                return Ok(vec![sum]); // of a linear operator
            }
            Tensor::f_run_backward(&[sum], &leaves[..1], false, false)
        };
        let outputs = second();
        self.push_all(name, outputs);
    }

    /// Writes to an output that is given.
    pub fn write(
        &mut self,
        name: &str,
        (sizes, kind, input): (&[i64], Kind, Option<&Tensor>),
        f: impl Fn(&Tensor) -> Result<Tensor, TchError>,
    ) {
        let name = self.count(name);
        let (layout, out) = self.draw.out(sizes, kind, input);
        let is_deterministic = self.draw.once_in(4);
        if is_deterministic {
            set_deterministic(DeterministicMode::Error).unwrap();
        }
        let result = tch::no_grad(|| f(&out));
        set_deterministic(DeterministicMode::Off).unwrap();
        self.push(&format!("{name} into {layout}"), result.map(|_| out));
    }
}

/// Whether both lie alike, and are as close as rounding lets them be.
pub fn is_near(both: &Both) -> Result<(), String> {
    both.lie_alike()?;
    let Some((ours, _)) = both.found()? else { return Ok(()) };
    let tolerance = match ours.numbers.kind() {
        Kind::Float if !both.name.contains("BFloat16") && !both.name.contains("Half") => 1e-5,
        Kind::Double if !both.name.contains("BFloat16") && !both.name.contains("Half") => 1e-12,
        _ => 3e-2,
    };
    both.are_close(tolerance, 1.0)
}
