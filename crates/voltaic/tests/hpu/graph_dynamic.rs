//! What is dynamic between modules that are graphs, with all that a run may have: the bits of a run without graphs.

use tch::{Kind, Tensor};
use voltaic::graph::{GraphedModule, ModuleCacher, mark_step};
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Forward, Identity, Relu, Sequential};
use voltaic::{Device, Module};

use crate::graph_modes::{
    Configure, Trained, fit, folder_of_ranks, optimizers, perceptron, resume, run, run_ranks,
};
use crate::support::{CPU, start};

/// The output of the first module goes to the second or the third by chance; or its rows are chosen by what they hold.
#[derive(Module)]
struct Dynamic {
    first: GraphedModule<Sequential>,
    second: GraphedModule<Identity>,
    third: GraphedModule<Relu>,
    chooses_rows: bool,
}

impl Dynamic {
    fn new(device: Device, chooses_rows: bool, max_graphs: usize) -> Self {
        let cacher = ModuleCacher::new(max_graphs);
        Self {
            first: cacher.wrap(perceptron(device)),
            second: cacher.wrap(Identity),
            third: cacher.wrap(Relu),
            chooses_rows,
        }
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> anyhow::Result<Tensor> {
        let hidden = self.first.forward(x)?;
        if self.chooses_rows {
            mark_step()?;
            let chosen = hidden.f_select(1, 0)?.f_lt(0.0)?;
            let (hidden, y) = (hidden.f_index(&[Some(&chosen)])?, y.f_index(&[Some(&chosen)])?);
            mark_step()?;
            return Ok(cross_entropy(&self.second.forward(&hidden)?, &y)?);
        }
        // from the generator of the host, which checkpoints hold
        let coin = Tensor::f_rand([] as [i64; 0], (Kind::Double, CPU))?.f_double_value(&[])?;
        let output = if coin > 0.5 { self.second.forward(&hidden)? } else { self.third.forward(&hidden)? };
        Ok(cross_entropy(&output, y)?)
    }
}

lightning_module!(Dynamic, (Tensor, Tensor), manual(optimizers()), |net, (x, y), ctx| {
    ctx.optimizer(0)?.zero_grad()?;
    let loss = net.loss(x, y)?;
    ctx.manual_backward(&loss)?;
    ctx.optimizer(0)?.step()?;
    ctx.lr_scheduler_step(0, None)?;
    ctx.log("train_loss", &loss);
    Ok(loss)
});

/// Each with branches, then with rows.
fn pairs(train: impl Fn(bool, usize) -> Trained) {
    for chooses_rows in [false, true] {
        let (without, graphed) = (train(chooses_rows, 0), train(chooses_rows, 10));
        assert!(without == graphed, "chooses rows: {chooses_rows}: {:?} {:?}", without.rows, graphed.rows);
        assert_eq!(without.global_step, 12);
    }
}

#[test]
fn dynamic_parts_between_graphs_train_the_same_in_float32_and_bfloat16_and_resumed() {
    let _rng = start();
    let configures: [Configure; 2] = [|t| t, |t| t.precision("bf16-mixed")];
    for configure in configures {
        pairs(|rows, max_graphs| fit(|device| Dynamic::new(device, rows, max_graphs), configure));
    }
    pairs(|rows, max_graphs| {
        let resumed = resume(|device| Dynamic::new(device, rows, max_graphs));
        let whole = fit(|device| Dynamic::new(device, rows, max_graphs), |t| t);
        assert_eq!(resumed.rows, whole.rows[4..], "rows {rows}, max_graphs {max_graphs}");
        assert!(resumed.weights == whole.weights);
        resumed
    });
}

#[test]
fn dynamic_parts_between_graphs_train_the_same_with_two_ranks() {
    if let Some(folder) = folder_of_ranks() {
        pairs(|rows, max_graphs| {
            let make = |device| Dynamic::new(device, rows, max_graphs);
            let root = folder.join(format!("{rows}_{max_graphs}"));
            let (trained, module) = run(make, &root, |t| t.devices(2), None).unwrap();
            assert_eq!(module.first.stats().hits, if max_graphs == 0 { 0 } else { 10 });
            trained
        });
        println!("all equal");
        return;
    }
    assert_contains!(run_ranks(), "all equal");
}
