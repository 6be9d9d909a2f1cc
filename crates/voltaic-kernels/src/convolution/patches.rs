//! What the outputs of a convolution see of its input.

use std::ops::Range;

use crate::element::Bf16;
use crate::memory::sized;

/// Rows, or columns, of images and of their patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Axis {
    /// Pixels of an image.
    pub pixels: usize,
    /// Patches of an image.
    pub patches: usize,
    /// From patch to patch, in pixels.
    pub step: usize,
    /// Where the first patch starts: in the padding before the image, or in it.
    pub first: isize,
    /// Pixels of a patch.
    pub taps: usize,
}

/// Images `[images, height, width, channels]` in patches `[height, width, channels]`, with 0 around each image.
#[derive(Debug, Clone, Copy)]
pub struct Patches<'a> {
    /// All of them.
    pub images: &'a [Bf16],
    /// Of rows and columns.
    pub axes: [Axis; 2],
    /// Numbers of a pixel.
    pub channels: usize,
}

impl<'a> Patches<'a> {
    /// Numbers of a patch.
    pub fn depth(&self) -> usize {
        self.axes[0].taps * self.axes[1].taps * self.channels
    }

    /// The patches of a range, one after the other: image by image, row by row. They are written to `copy` unless they
    /// lie in the images like that.
    pub fn rows<'b>(&self, range: Range<usize>, copy: &'b mut Vec<Bf16>) -> &'b [Bf16]
    where
        'a: 'b,
    {
        let depth = self.depth();
        if self
            .axes
            .iter()
            .all(|axis| *axis == Axis { patches: axis.pixels, step: 1, first: 0, taps: 1, ..*axis })
        {
            return &self.images[range.start * depth..range.end * depth];
        }
        let copy = sized(copy, range.len() * depth);
        let columns = self.axes[1].patches;
        let (mut patch, mut rest) = (range.start, &mut copy[..]);
        while patch < range.end {
            let (line, column) = (patch / columns, patch % columns);
            let count = (columns - column).min(range.end - patch);
            let (copy, next) = rest.split_at_mut(count * depth);
            self.copy_line(line, column..column + count, copy);
            (patch, rest) = (patch + count, next);
        }
        copy
    }

    /// Copies patches of one row of an image.
    fn copy_line(&self, line: usize, patches: Range<usize>, copy: &mut [Bf16]) {
        let [rows, columns] = &self.axes;
        let (image, row) = (line / rows.patches, line % rows.patches);
        let (depth, width) = (self.depth(), columns.taps * self.channels);
        for tap in 0..rows.taps {
            let from = (row * rows.step + tap) as isize + rows.first;
            let copies = copy.chunks_exact_mut(depth).map(|copy| &mut copy[tap * width..][..width]);
            if (0..rows.pixels as isize).contains(&from) {
                let len = columns.pixels * self.channels;
                let pixels = &self.images[(image * rows.pixels + from as usize) * len..][..len];
                for (patch, copy) in patches.clone().zip(copies) {
                    let start = (patch * columns.step) as isize + columns.first;
                    copy_part(pixels, start * self.channels as isize, copy);
                }
            } else {
                copies.for_each(|copy| copy.fill(Bf16::default()));
            }
        }
    }
}

/// Copies `numbers[start..]`, with 0 for what lies outside of them.
fn copy_part(numbers: &[Bf16], start: isize, copy: &mut [Bf16]) {
    let end = start + copy.len() as isize;
    if start >= 0 && end <= numbers.len() as isize {
        copy.copy_from_slice(&numbers[start as usize..end as usize]);
        return;
    }
    let inside = |at: isize| at.clamp(0, copy.len() as isize) as usize;
    let (before, end) = (inside(-start), inside(numbers.len() as isize - start));
    copy.fill(Bf16::default());
    if before < end {
        let from = before.wrapping_add_signed(start);
        copy[before..end].copy_from_slice(&numbers[from..from + end - before]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(len: usize) -> Vec<Bf16> {
        (0..len).map(|i| Bf16(i as u16 + 1)).collect()
    }

    /// What a patch holds, pixel by pixel.
    fn expected(patches: &Patches, patch: usize) -> Vec<u16> {
        let [rows, columns] = patches.axes;
        let image = patch / (rows.patches * columns.patches);
        let at = [patch / columns.patches % rows.patches, patch % columns.patches];
        let mut all = Vec::new();
        for (y, x) in (0..rows.taps).flat_map(|y| (0..columns.taps).map(move |x| (y, x))) {
            let y = (at[0] * rows.step + y) as isize + rows.first;
            let x = (at[1] * columns.step + x) as isize + columns.first;
            let is_inside =
                (0..rows.pixels as isize).contains(&y) && (0..columns.pixels as isize).contains(&x);
            for channel in 0..patches.channels {
                let pixel = (image * rows.pixels).wrapping_add_signed(y).wrapping_mul(columns.pixels);
                let number =
                    pixel.wrapping_add_signed(x).wrapping_mul(patches.channels).wrapping_add(channel);
                all.push(if is_inside { patches.images[number].0 } else { 0 });
            }
        }
        all
    }

    #[test]
    fn patches_hold_what_lies_under_them() {
        let axis = |pixels, step, first: isize, taps| Axis { pixels, patches: 3, step, first, taps };
        for axes in [
            [axis(4, 1, -1, 3), axis(3, 1, -1, 3)],
            [axis(5, 2, -2, 3), axis(7, 3, -1, 2)],
            [axis(2, 1, 1, 2), axis(2, 1, -4, 3)], // much of them, and all of the first, lies outside
            [axis(3, 1, 0, 1), axis(3, 1, 0, 1)],
        ] {
            let images = numbers(2 * axes[0].pixels * axes[1].pixels * 2);
            let patches = Patches { images: &images, axes, channels: 2 };
            let mut copy = Vec::new();
            let rows = patches.rows(2..15, &mut copy);
            assert_eq!(rows.len(), 13 * patches.depth());
            for (patch, row) in (2..15).zip(rows.chunks(patches.depth())) {
                let row: Vec<u16> = row.iter().map(|number| number.0).collect();
                assert_eq!(row, expected(&patches, patch), "{axes:?}, {patch}");
            }
        }
    }
}
