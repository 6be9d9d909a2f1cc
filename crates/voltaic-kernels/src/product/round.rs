//! From sums in float32 to bfloat16.

use crate::element::{Bf16, Element};
use crate::kernel::Kernel;

/// What is added to sums before they are rounded.
#[derive(Debug, Clone, Copy)]
pub enum Addend<'a> {
    /// Nothing.
    Zero,
    /// What is in the output.
    Output,
    /// One row for all.
    Row(&'a [Bf16]),
}

/// Writes rows of sums, rounded once.
pub struct RoundRows<'a> {
    /// `[rows, width]`
    pub sums: &'a [f32],
    /// Numbers of a row.
    pub width: usize,
    /// Rows `stride` apart, the first at the start.
    pub output: &'a mut [Bf16],
    /// From row to row of the output; at least `width`.
    pub stride: usize,
    /// What is added.
    pub addend: Addend<'a>,
}

impl Kernel for RoundRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { sums, width, output, stride, addend } = self;
        if let (Addend::Zero, true) = (addend, stride == width) {
            output.iter_mut().zip(sums).for_each(|(out, sum)| *out = Bf16::from_f32(*sum));
            return;
        }
        for (sums, output) in sums.chunks_exact(width).zip(output.chunks_mut(stride)) {
            let pairs = output[..width].iter_mut().zip(sums);
            match addend {
                Addend::Zero => pairs.for_each(|(out, sum)| *out = Bf16::from_f32(*sum)),
                Addend::Output => pairs.for_each(|(out, sum)| *out = Bf16::from_f32(*sum + out.to_f32())),
                Addend::Row(row) => {
                    pairs.zip(row).for_each(|((out, sum), add)| *out = Bf16::from_f32(*sum + add.to_f32()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_rounded_with_what_is_added() {
        let sums = [1.0f32, 2.0, 3.0, 4.0];
        let row = [10.0, 20.0].map(Bf16::from_f32);
        for (addend, expected) in [
            (Addend::Zero, [1.0, 2.0, 9.0, 3.0, 4.0]),
            (Addend::Output, [10.0, 11.0, 9.0, 12.0, 13.0]),
            (Addend::Row(&row), [11.0, 22.0, 9.0, 13.0, 24.0]),
        ] {
            let mut output = [9.0; 5].map(Bf16::from_f32);
            RoundRows { sums: &sums, width: 2, output: &mut output, stride: 3, addend }.run();
            assert_eq!(output.map(Bf16::to_f32), expected);
        }
    }
}
