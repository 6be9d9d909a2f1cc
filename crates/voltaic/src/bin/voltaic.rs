//! The `voltaic` command.

fn main() {
    println!("libtorch {}", voltaic::ffi::libtorch_version());
}
