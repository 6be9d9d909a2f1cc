//! TensorBoard's event files.

use rand::RngExt;
use voltaic::logger::tfevents::{Event, read_record, write_record};

use crate::mutate::mutated;
use crate::stress;

#[test]
fn events() {
    let mut whole = Vec::new();
    write_record(&mut whole, Event::version(1.0).encode()).unwrap();
    for step in 0..3 {
        let scalars = [("loss".to_owned(), 0.5), ("acc".to_owned(), f64::NAN)];
        write_record(&mut whole, Event::scalars(2.0, step, &scalars).encode()).unwrap();
    }
    stress("event files", |rng| {
        let bytes = mutated(&whole, &[b"\xff\xff\xff\xff\xff\xff\xff\x7f"], rng);
        let mut rest = &bytes[..];
        if rng.random_range(0..16) == 0 {
            rest = &rest[rng.random_range(0..=rest.len())..];
        }
        loop {
            match read_record(&mut rest) {
                Ok(Some(_)) => {}
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    });
}
