//! Floating-point operations of a recorded graph: those of products, convolutions and attention, which are nearly all.

use super::ir::{Graph, Node, Operand};

/// Floating-point operations of one batch; a multiplication with its addition counts as two.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flops {
    /// Forward and backward.
    pub total: u64,
    /// Forward alone.
    pub forward: u64,
    /// Forward by the module whose call it is in, by fqn, in the order in which they ran. What is in no call of a module
    /// below the root counts for the layer whose weights it takes; without weights, for the layer before it; what comes
    /// before all weights has an empty name.
    pub layers: Vec<(String, u64)>,
}

impl Flops {
    /// Counts the operations of recordings that follow each other.
    pub(crate) fn of(graphs: &[Graph]) -> Self {
        let mut flops = Self::default();
        let mut layer = String::new();
        for graph in graphs {
            for node in &graph.nodes {
                let is_forward = node.backward_node.is_empty();
                if is_forward && !node.scope.is_empty() {
                    layer.clone_from(&node.scope); // the module whose call it is in
                } else if is_forward && let Some(own) = graph.layer_of(node) {
                    layer = own.to_owned();
                }
                let count = graph.flops_of(node);
                flops.total += count;
                if count == 0 || !is_forward {
                    continue;
                }
                flops.forward += count;
                match flops.layers.iter_mut().find(|(known, _)| *known == layer) {
                    Some((_, sum)) => *sum += count,
                    None => flops.layers.push((layer.clone(), count)),
                }
            }
        }
        flops
    }

    /// Forward operations of the layer `fqn` and of those below it.
    pub fn of_layer(&self, fqn: &str) -> u64 {
        let is_within = |name: &str| {
            name.strip_prefix(fqn)
                .is_some_and(|rest| rest.is_empty() || fqn.is_empty() || rest.starts_with('.'))
        };
        self.layers.iter().filter(|(name, _)| is_within(name)).map(|(_, count)| count).sum()
    }
}

impl Graph {
    /// The layer whose weights a node takes.
    fn layer_of(&self, node: &Node) -> Option<&str> {
        // inputs have names with blanks, weights have not
        let mut names = node.values().filter_map(|value| self.buffer_name(self.values[value].buffer));
        let weight = names.find(|name| !name.contains(' '))?;
        Some(weight.rsplit_once('.').map_or("", |(layer, _)| layer))
    }

    /// Shape of an argument that is a tensor.
    fn size_of<'a>(&'a self, operands: &'a [Operand], at: usize) -> &'a [i64] {
        let value = operands.get(at).and_then(|operand| operand.values().next());
        value.map_or(&[], |value| &self.values[value].size)
    }

    /// Operations of one operator; 0 for those that do not count. The formulas are those of PyTorch's
    /// `torch.utils.flop_counter`.
    fn flops_of(&self, node: &Node) -> u64 {
        let argument = |at| self.size_of(&node.arguments, at);
        let count = match node.name().trim_end_matches('_') {
            "mm" | "mv" | "dot" | "vdot" | "bmm" => product(argument(0), argument(1)),
            "addmm" | "_addmm_activation" | "addmv" | "baddbmm" | "addbmm" => {
                product(argument(1), argument(2))
            }
            "linear" => product(argument(0), &transposed(argument(1))),
            "convolution" | "_convolution" | "convolution_overrideable" => {
                let is_transposed = is_true(node.arguments.get(6));
                convolution(argument(0), argument(1), self.size_of(&node.results, 0), is_transposed)
            }
            "mkldnn_convolution"
            | "_slow_conv2d_forward"
            | "slow_conv3d_forward"
            | "thnn_conv2d"
            | "_conv_depthwise2d"
            | "cudnn_convolution" => {
                convolution(argument(0), argument(1), self.size_of(&node.results, 0), false)
            }
            "convolution_backward" | "convolution_backward_overrideable" => {
                let is_transposed = is_true(node.arguments.get(7));
                let forward = convolution(argument(1), argument(2), argument(0), is_transposed);
                let wanted = node.results.iter().take(2).filter(|result| result.values().next().is_some());
                forward * wanted.count() as i64
            }
            name if name.starts_with("_scaled_dot_product") && name.ends_with("_backward") => {
                // the scores again, and gradients of weights, values, queries and keys
                attention(argument(1), argument(2), argument(3), 3, 2)
            }
            name if name.starts_with("_scaled_dot_product") => {
                attention(argument(0), argument(1), argument(2), 1, 1)
            }
            _ => 0,
        };
        u64::try_from(count).unwrap_or(0)
    }
}

fn is_true(operand: Option<&Operand>) -> bool {
    matches!(operand, Some(Operand::Constant(text)) if text.eq_ignore_ascii_case("true") || text == "1")
}

fn transposed(size: &[i64]) -> Vec<i64> {
    size.iter().rev().copied().collect()
}

/// `[.., m, k]` times `[.., k, n]`; vectors lack `m` or `n`.
fn product(a: &[i64], b: &[i64]) -> i64 {
    let n = if b.len() > 1 { b[b.len() - 1] } else { 1 };
    if a.is_empty() || b.is_empty() { 0 } else { 2 * a.iter().product::<i64>() * n }
}

/// `input` and `output` are `[n, channels, ..]`, `weight` `[out, in / groups, ..]`, or `[in, out / groups, ..]` if it is
/// transposed: each element of the weight meets each place of the output, or of the input.
fn convolution(input: &[i64], weight: &[i64], output: &[i64], is_transposed: bool) -> i64 {
    let places = if is_transposed { input } else { output };
    if places.len() < 2 || weight.len() < 2 {
        return 0;
    }
    2 * places[0] * places[2..].iter().product::<i64>() * weight.iter().product::<i64>()
}

/// Queries `[.., s, d]`, keys `[.., t, d]`, values `[.., t, e]`; so many products over `d`, and over `e`.
fn attention(query: &[i64], key: &[i64], value: &[i64], over_d: i64, over_e: i64) -> i64 {
    let ([rest @ .., s, d], [.., t, _], [.., e]) = (query, key, value) else { return 0 };
    2 * rest.iter().product::<i64>() * s * t * (over_d * d + over_e * e)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_give_the_counts_of_the_formulas() {
        assert_eq!(product(&[2, 3], &[3, 4]), 2 * 2 * 3 * 4);
        assert_eq!(product(&[5, 2, 3], &[5, 3, 4]), 2 * 5 * 2 * 3 * 4);
        assert_eq!((product(&[2, 3], &[3]), product(&[3], &[3])), (12, 6));
        // 3x3 kernels, 4 groups of 2 channels, to 8x8 places
        assert_eq!(convolution(&[1, 8, 10, 10], &[16, 2, 3, 3], &[1, 16, 8, 8], false), 2 * 64 * 16 * 2 * 9);
        assert_eq!(convolution(&[1, 16, 8, 8], &[16, 2, 3, 3], &[1, 2, 10, 10], true), 2 * 64 * 16 * 2 * 9);
        let (q, k, v) = ([2, 4, 10, 8], [2, 4, 12, 8], [2, 4, 12, 6]);
        assert_eq!(attention(&q, &k, &v, 1, 1), 2 * 8 * 10 * 12 * (8 + 6));
        assert_eq!(attention(&q, &k, &v, 3, 2), 2 * 8 * 10 * 12 * (3 * 8 + 2 * 6));
        let layers = vec![("a".to_owned(), 1), ("a.b".to_owned(), 2), ("ab".to_owned(), 4)];
        let flops = Flops { total: 0, forward: 0, layers };
        assert_eq!(["a", "a.b", "ab", "b", ""].map(|fqn| flops.of_layer(fqn)), [3, 2, 4, 0, 7]);
    }
}
