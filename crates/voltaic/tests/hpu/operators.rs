//! Operators give the same bits on the emulated HPU as on the CPU: as many as made-up arguments can call, and recurrent
//! layers, which libtorch computes in another way off the CPU.

use tch::nn::{self, RNN};
use tch::{Kind, Tensor};
use voltaic::ffi;

use crate::support::{CPU, HPU, bits, start};

#[test]
fn operators_give_the_same_bits() {
    let _rng = start();
    let compared = ffi::compare_hpu_operators().unwrap();
    let different: Vec<String> = compared
        .iter()
        .filter_map(|(op, difference)| Some(format!("{op}: {}", difference.as_ref()?)))
        .collect();
    println!("{} operators compared", compared.len());
    assert!(
        different.is_empty(),
        "{} of {} differ:\n{}",
        different.len(),
        compared.len(),
        different.join("\n")
    );
    assert!(compared.len() >= 300, "only {} operators could be called", compared.len());
}

/// Losses, gradients and weights of a recurrent net after steps of SGD.
fn train<R: RNN>(device: tch::Device, layer: impl Fn(&nn::Path) -> R) -> Vec<Vec<u8>> {
    ffi::manual_seed(3).unwrap();
    let vars = nn::VarStore::new(CPU);
    let net = layer(&vars.root());
    let mut vars = vars;
    vars.set_device(device);
    let mut trace = Vec::new();
    for step in 0..3 {
        ffi::manual_seed(step).unwrap();
        let x = Tensor::randn([2, 5, 4], (Kind::Float, CPU)).to_device(device);
        let (y, _) = net.seq(&x);
        let loss = y.square().mean(Kind::Float);
        loss.backward();
        trace.push(bits(&loss));
        for mut weight in vars.trainable_variables() {
            let gradient = weight.grad();
            trace.push(bits(&gradient));
            tch::no_grad(|| weight -= &gradient * 0.1);
            weight.zero_grad();
            trace.push(bits(&weight));
        }
    }
    trace
}

#[test]
fn recurrent_layers_train_to_the_same_bits() {
    let _rng = start();
    let config = || nn::RNNConfig { num_layers: 2, bidirectional: true, ..nn::RNNConfig::default() };
    assert_eq!(
        train(CPU, |path| nn::lstm(path, 4, 6, config())),
        train(HPU, |path| nn::lstm(path, 4, 6, config())),
        "lstm"
    );
    assert_eq!(
        train(CPU, |path| nn::gru(path, 4, 6, config())),
        train(HPU, |path| nn::gru(path, 4, 6, config())),
        "gru"
    );
}

#[test]
fn a_hidden_state_that_is_carried_on_keeps_no_history() {
    let _rng = start();
    let vars = nn::VarStore::new(CPU);
    let net = nn::lstm(vars.root(), 8, 8, nn::RNNConfig::default());
    let mut vars = vars;
    vars.set_device(HPU);
    let mut state = net.zero_state(2);
    let pool = ffi::hpu_pool(0).unwrap();
    let mut in_use = Vec::new();
    for _ in 0..6 {
        let x = Tensor::ones([2, 16, 8], (Kind::Float, HPU));
        let (y, next) = net.seq_init(&x, &state);
        y.sum(Kind::Float).backward();
        state = nn::LSTMState((next.h().detach(), next.c().detach()));
        drop((y, next));
        in_use.push(pool.stats().in_use);
    }
    assert_eq!(in_use[2], in_use[5], "{in_use:?}");
}
