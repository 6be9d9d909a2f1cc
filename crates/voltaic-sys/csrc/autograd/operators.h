// Operators of a thread, seen below autograd and above the devices' kernels.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKey.h>

namespace voltaic::autograd {

using OperatorKernel = void(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack);

// A thread whose set of included keys has it sees its operators.
inline constexpr c10::DispatchKey below_key = c10::DispatchKey::Fake;

// Puts a kernel under the key, once per process: it calls the scope of saved results, then the recorder.
void register_below();
// What operators run by that no scope of saved results answers; null: as usual. Set once, before a thread includes the key.
void set_recorder(OperatorKernel *recorder);
// Runs an operator as if the key were not there.
void run_below(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack);

} // namespace voltaic::autograd
