//! Buffers that threads keep between calls, by how much memory they are.

/// What a kernel keeps to be used again.
pub trait Held: Default + Send + 'static {
    /// Bytes on the heap.
    fn bytes(&self) -> usize;
}

impl<T: Send + 'static> Held for Vec<T> {
    fn bytes(&self) -> usize {
        self.capacity() * size_of::<T>()
    }
}

impl<T: Held, const N: usize> Held for [T; N]
where
    [T; N]: Default,
{
    fn bytes(&self) -> usize {
        self.iter().map(T::bytes).sum()
    }
}

/// Makes a struct of buffers one that is [`Held`].
macro_rules! held {
    ($name:ty { $($field:ident),+ }) => {
        impl $crate::held::Held for $name {
            fn bytes(&self) -> usize {
                0 $(+ $crate::held::Held::bytes(&self.$field))+
            }
        }
    };
}
pub(crate) use held;
