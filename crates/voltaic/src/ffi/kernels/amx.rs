//! Tiles of Intel's processors (AMX), where a virtual machine offers them and does not say what they are.

use std::env;

use crate::ffi::device::backend::set_environment;
use crate::kernels::has_undescribed_amx;

/// oneDNN's limit on instructions; it reads one of them at its first operator.
const LIMITS: [&str; 2] = ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"];
/// oneDNN's highest instruction set without AMX.
const WITHOUT_AMX: &str = "AVX512_CORE_FP16";

/// Keeps oneDNN from AMX if the processor has it without saying what its tiles are, as some virtual machines have it:
/// oneDNN then sets up tiles of no size, and its bfloat16 and int8 operators end the process with an illegal
/// instruction, or with "could not create a primitive". A limit that the environment sets is kept.
///
/// Source: CPUID leaf 0x1D, "Tile Information", of Intel's architecture manual.
pub(crate) fn withhold_undescribed_amx() {
    if has_undescribed_amx() && LIMITS.iter().all(|name| env::var_os(name).is_none()) {
        tracing::info!(
            "this machine has AMX but does not say what its tiles are (CPUID leaf 0x1D is empty), so oneDNN is kept \
             from it; {}={WITHOUT_AMX} is set, or set another limit yourself",
            LIMITS[0]
        );
        set_environment(LIMITS[0], WITHOUT_AMX);
    }
}
