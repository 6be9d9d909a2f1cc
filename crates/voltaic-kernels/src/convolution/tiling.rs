//! How images are cut into tiles, and how the numbers of transformed tiles lie in memory.

use std::ops::Range;

use crate::processor::lanes::{InLanes, LANES, Lanes};
use crate::product::strips::COLUMNS;

/// Lanes of each pixel, or place, of a tile.
pub(crate) type Square<const N: usize> = [[Lanes; N]; N];

/// Images `[images, height, width, channels]` in tiles: rows of them, one after the other through all images.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiling {
    /// Height and width of an image.
    pub size: [usize; 2],
    /// Rows and columns of tiles of an image.
    pub tiles: [usize; 2],
    /// From tile to tile.
    pub step: usize,
    /// Numbers of a pixel: a multiple of [`LANES`].
    pub channels: usize,
    /// The first row and column of the first tile, which may lie before the image.
    pub first: isize,
}

impl Tiling {
    /// Of outputs: each pixel is in one tile.
    pub fn of_outputs(size: [usize; 2], channels: usize, step: usize) -> Self {
        Self { size, tiles: size.map(|pixels| pixels.div_ceil(step)), step, channels, first: 0 }
    }

    /// The rows of images, one after the other through all images, that some rows of tiles cover.
    pub fn lines(&self, rows: &Range<usize>) -> Range<usize> {
        let line = |row: usize| {
            let (image, row) = (row / self.tiles[0], row % self.tiles[0]);
            image * self.size[0] + self.step * row
        };
        line(rows.start)..line(rows.end)
    }

    /// Fails unless all images of these rows lie in `len` numbers, and channels in lanes.
    pub fn check(&self, rows: &Range<usize>, len: usize) {
        let images = rows.end.div_ceil(self.tiles[0]);
        assert!(images * self.size[0] * self.size[1] * self.channels <= len, "{self:?}, {rows:?} in {len}");
        assert!(self.channels.is_multiple_of(LANES), "{self:?}");
    }

    /// The `N` x `N` pixels of a tile.
    #[inline(always)]
    pub fn window<const N: usize>(&self, row: usize, column: usize) -> Window {
        let (image, row) = (row / self.tiles[0], row % self.tiles[0]);
        let [height, width] = self.size;
        let first = |tile: usize| (self.step * tile) as isize + self.first;
        let (y, x) = (first(row), first(column));
        let inside = |first: isize, pixels: usize| {
            let (before, rest) = ((-first).max(0) as usize, (pixels as isize - first).max(0) as usize);
            before.min(N)..rest.min(N)
        };
        let pixel = ((image * height) as isize + y) * width as isize + x;
        Window {
            first: pixel * self.channels as isize,
            steps: [width * self.channels, self.channels],
            rows: inside(y, height),
            columns: inside(x, width),
        }
    }
}

/// Pixels of a tile.
pub(crate) struct Window {
    /// Where the numbers of the first one would start, be it there or not.
    first: isize,
    /// From row to row, and from column to column.
    steps: [usize; 2],
    /// Those that are in the image.
    pub rows: Range<usize>,
    columns: Range<usize>,
}

impl Window {
    /// Where a row and column starts.
    #[inline(always)]
    pub fn at(&self, row: usize, column: usize) -> isize {
        self.first + (row * self.steps[0] + column * self.steps[1]) as isize
    }

    /// How many lanes of a column are there: all or none.
    #[inline(always)]
    pub fn lanes(&self, column: usize) -> usize {
        if self.columns.contains(&column) { LANES } else { 0 }
    }

    /// Reads lanes of the pixels, 0 where there is none.
    ///
    /// # Safety
    /// As for [`Lanes::zero`]; those that are in the image must be readable from `channel` on.
    #[inline(always)]
    pub unsafe fn load<T: InLanes, const N: usize>(&self, images: *const T, channel: usize) -> Square<N> {
        // SAFETY: as this function asks.
        unsafe {
            let mut square = [[Lanes::zero(); N]; N];
            let is_whole = self.rows == (0..N) && self.columns == (0..N);
            for (row, pixels) in square.iter_mut().enumerate() {
                for (column, lanes) in pixels.iter_mut().enumerate() {
                    let from = images.wrapping_offset(self.at(row, column)).wrapping_add(channel);
                    if is_whole {
                        *lanes = T::load(from);
                    } else if self.rows.contains(&row) {
                        *lanes = T::load_some(from, self.lanes(column));
                    }
                }
            }
            square
        }
    }
}

/// Numbers between places: at distances of a power of two, all would share the same lines of the first cache.
const GAP: usize = LANES;

/// How a matrix of numbers lies in each place of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Places {
    order: PlaceOrder,
    /// Rows and columns.
    pub shape: [usize; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PlaceOrder {
    /// `[rows, columns]`
    Rows,
    /// `[strips of columns, rows, columns of the strip]`
    Strips,
}

impl Places {
    /// Row by row.
    pub fn in_rows(shape: [usize; 2]) -> Self {
        Self { order: PlaceOrder::Rows, shape }
    }

    /// By strips of columns.
    pub fn in_strips(shape: [usize; 2]) -> Self {
        Self { order: PlaceOrder::Strips, shape }
    }

    /// Numbers of a place.
    pub fn len(self) -> usize {
        let [rows, columns] = self.shape;
        match self.order {
            PlaceOrder::Rows => rows * columns,
            PlaceOrder::Strips => rows * columns.next_multiple_of(COLUMNS),
        }
    }

    /// From place to place.
    pub fn step(self) -> usize {
        self.len() + GAP
    }

    /// The numbers of each place.
    pub fn of(self, numbers: &[f32]) -> impl Iterator<Item = &[f32]> {
        numbers.chunks_exact(self.step()).map(move |place| &place[..self.len()])
    }

    /// Where a row and column is in a place.
    #[inline(always)]
    pub fn at(self, row: usize, column: usize) -> usize {
        let [rows, columns] = self.shape;
        match self.order {
            PlaceOrder::Rows => row * columns + column,
            PlaceOrder::Strips => (column / COLUMNS * rows + row) * COLUMNS + column % COLUMNS,
        }
    }
}
