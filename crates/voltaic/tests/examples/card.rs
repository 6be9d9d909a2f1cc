//! Programs of the chapter on a Gaudi card, for which a stand-in stands: what is tested of them on the emulator holds there.

use std::process::Command;

use crate::stand_ins::stand_ins;

/// Runs other tests of this binary with the stand-in.
fn passes_on_a_card(tests: &[&str]) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let stand_ins = stand_ins();
    command.args(tests).args(["--test-threads", "1"]);
    command.env("VOLTAIC_HPU", "gaudi").env("VOLTAIC_HLML", &stand_ins.hlml);
    command.env("VOLTAIC_HPU_PLUGIN", &stand_ins.plugin);
    command.env("VOLTAIC_HCCL", &stand_ins.hccl).env("VOLTAIC_SYNAPSE", &stand_ins.hccl);
    let output = command.output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{out}{}", String::from_utf8_lossy(&output.stderr));
    assert!(!out.contains("running 0 tests"), "{out}");
}

#[test]
fn graphs() {
    passes_on_a_card(&["hpu_graphs_training::", "hpu_graphs_inference::", "hpu_graphs_dynamic::"]);
}

#[test]
fn mixed_precision() {
    passes_on_a_card(&["autocast::", "mixed_precision::"]);
}
