//! Texts that end at different lengths on different ranks: all ranks end together, and each text is that of one process.

use std::sync::atomic::{AtomicUsize, Ordering};

use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::generation::{CausalLm, GenerationConfig, Generator, KvCache};
use voltaic::models::{Gpt, GptConfig};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::ModuleExt;
use voltaic::optim::Optimizers;
use voltaic::{Module, Tensor};

use crate::ranks::{on_ranks, silent};

const VOCAB: i64 = 61;
/// Longer than prompts and context together, so that caches become full at different passes.
const NEW_TOKENS: usize = 20;
/// Prompts of two batches of each rank.
const PROMPTS: i64 = 8;
const LONGEST_PROMPT: i64 = 6;
/// Stands where a shorter text has no token.
const NO_TOKEN: i64 = -1;

/// Continues the prompts of a batch, and counts its forward passes.
#[derive(Module)]
struct Continues {
    gpt: Gpt,
    #[module(skip)]
    config: GenerationConfig,
    #[module(skip)]
    passes: AtomicUsize,
}

impl Continues {
    fn new(config: GenerationConfig) -> Self {
        voltaic::ffi::manual_seed(5).unwrap();
        let sizes = GptConfig {
            vocab_size: VOCAB,
            block_size: 16,
            n_layer: 2,
            n_head: 2,
            n_embd: 24,
            ..GptConfig::tiny()
        };
        let mut gpt = Gpt::new(sizes).unwrap();
        // larger than at the start, so that texts differ
        tch::no_grad(|| {
            for parameter in gpt.parameters() {
                let _ = parameter.shallow_clone().normal_(0.0, 0.4);
            }
        });
        gpt.eval();
        Self { gpt, config, passes: AtomicUsize::new(0) }
    }
}

impl CausalLm for Continues {
    fn vocab_size(&self) -> i64 {
        self.gpt.vocab_size()
    }

    fn context_length(&self) -> i64 {
        self.gpt.context_length()
    }

    fn next_logits(&self, tokens: &Tensor, cache: &KvCache) -> anyhow::Result<Tensor> {
        self.passes.fetch_add(1, Ordering::Relaxed);
        self.gpt.next_logits(tokens, cache)
    }
}

impl LightningModule for Continues {
    type Batch = Tensor;

    fn training_step(&self, _batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        anyhow::bail!("it does not train")
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Optimizers::none())
    }

    fn predict_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let mut generator = Generator::new(self, self.config.clone())?;
        if let Some(ranks) = ctx.process_group() {
            generator = generator.ranks(ranks);
        }
        let done = generator.generate(&texts(batch))?;
        let tokens = done.sequences.into_iter().flat_map(|sequence| {
            let mut tokens = sequence.tokens;
            tokens.resize(NEW_TOKENS, NO_TOKEN);
            tokens
        });
        Ok(Tensor::f_from_slice(&tokens.collect::<Vec<_>>())?.f_view([-1, NEW_TOKENS as i64])?)
    }
}

/// The rows of a tensor without what stands for no token.
fn texts(rows: &Tensor) -> Vec<Vec<i64>> {
    let row = |index| Vec::<i64>::try_from(rows.get(index)).unwrap();
    let tokens = |row: Vec<i64>| row.into_iter().filter(|token| *token != NO_TOKEN).collect();
    (0..rows.size()[0]).map(row).map(tokens).collect()
}

/// Prompts of 1 to 6 tokens.
fn prompts() -> Tensor {
    let token = |prompt: i64, place: i64| match place <= (prompt * 5) % LONGEST_PROMPT {
        true => (prompt * prompt + 7 * place) % VOCAB,
        false => NO_TOKEN,
    };
    let tokens = (0..PROMPTS).flat_map(|prompt| (0..LONGEST_PROMPT).map(move |place| token(prompt, place)));
    Tensor::from_slice(&tokens.collect::<Vec<_>>()).view([PROMPTS, LONGEST_PROMPT])
}

/// What one process continues the prompts of each rank and batch with: the sampler gives each rank every second one.
fn by_one_process(config: &GenerationConfig) -> [[Vec<Vec<i64>>; 2]; 2] {
    let (net, prompts) = (Continues::new(config.clone()), texts(&prompts()));
    [0, 1].map(|rank| {
        [0, 4].map(|first| {
            let own = [prompts[first + rank].clone(), prompts[first + rank + 2].clone()];
            let done = Generator::new(&net.gpt, config.clone()).unwrap().generate(&own).unwrap();
            done.sequences.into_iter().map(|sequence| sequence.tokens).collect()
        })
    })
}

fn longest(texts: &[Vec<i64>]) -> usize {
    texts.iter().map(Vec::len).max().unwrap()
}

#[test]
fn ranks_end_together_whatever_the_lengths_of_their_texts() {
    on_ranks("generation::ranks_end_together_whatever_the_lengths_of_their_texts", 2, |ranks, folder| {
        for temperature in [0.0, 1.0] {
            let mut config =
                GenerationConfig { max_new_tokens: NEW_TOKENS, temperature, ..Default::default() };
            // the texts of rank 0 end early in the first batch, and those of rank 1 in the second
            let full = by_one_process(&config);
            let ends =
                [&full[0][0], &full[1][1]].map(|texts| [texts[0][1..3].to_vec(), texts[1][4..6].to_vec()]);
            config.stop = ends.into_iter().flatten().collect();
            let expected = by_one_process(&config);
            let lengths = [0, 1].map(|batch| [0, 1].map(|rank| longest(&expected[rank][batch])));
            assert!(lengths.iter().all(|[a, b]| a != b), "{lengths:?}");
            for (strategy, use_graph) in [("ddp", false), ("ddp", true), ("zero3", false)] {
                let what = format!("{strategy}, graph {use_graph}, temperature {temperature}");
                let mut net = Continues::new(GenerationConfig { use_graph, ..config.clone() });
                let mut trainer = silent(ranks, strategy, folder).build().unwrap();
                let loader =
                    DataLoader::new(TensorDataset::new(prompts()).unwrap()).batch_size(2).build().unwrap();
                let found = trainer.predict(&mut net, &mut Loaders::new().predict(loader)).unwrap();
                let own: Vec<_> = found[0].iter().map(texts).collect();
                assert_eq!(own, expected[trainer.world().rank], "{what}");
                if !use_graph {
                    let passes: usize = lengths.iter().map(|lengths| lengths.iter().max().unwrap()).sum();
                    assert_eq!(net.passes.into_inner(), passes, "{what}: of the longest text of all ranks");
                }
            }
        }
    });
}
