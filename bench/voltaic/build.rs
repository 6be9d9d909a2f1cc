//! Links to libtorch.

fn main() {
    voltaic_build::link();
}
