//! nanoGPT's model in candle, with a cache of keys and values: what it generates.

use anyhow::{Context, bail};
use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use candle_nn::kv_cache::KvCache;
use candle_nn::{Embedding, LayerNorm, Linear, Module, VarBuilder};
use measure::generate::{GenerateJob, GenerateReport, GenerateTask, TaskReport};

const LAYERS: usize = 6;
const HEADS: usize = 6;
const CHANNELS: usize = 384;
const CONTEXT: usize = 256;
const VOCAB: usize = 256;

/// Does the job.
pub fn run(job: &GenerateJob) -> anyhow::Result<()> {
    if (job.variant.as_str(), job.format.as_str()) != ("plain", "f32") {
        bail!("there is no {} {}; use plain f32", job.variant, job.format);
    }
    let weights = candle_core::safetensors::load(&job.weights, &Device::Cpu)?;
    let mut gpt = Gpt::new(&VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu))?;
    let tasks = job.tasks.iter().map(|task| gpt.run(task)).collect::<anyhow::Result<_>>()?;
    GenerateReport::print(tasks, candle_core::utils::get_num_threads())
}

struct Block {
    ln_1: LayerNorm,
    c_attn: Linear,
    c_proj: Linear,
    ln_2: LayerNorm,
    c_fc: Linear,
    mlp_proj: Linear,
    cache: KvCache,
}

struct Gpt {
    wte: Embedding,
    wpe: Tensor,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
    lm_head: Linear,
}

fn norm(builder: &VarBuilder) -> Result<LayerNorm> {
    Ok(LayerNorm::new_no_bias(builder.get(CHANNELS, "weight")?, 1e-5))
}

impl Gpt {
    fn new(builder: &VarBuilder) -> Result<Self> {
        let linear = candle_nn::linear_no_bias;
        let block = |layer: usize| {
            let builder = builder.pp(format!("transformer.h.{layer}"));
            Ok(Block {
                ln_1: norm(&builder.pp("ln_1"))?,
                c_attn: linear(CHANNELS, 3 * CHANNELS, builder.pp("attn.c_attn"))?,
                c_proj: linear(CHANNELS, CHANNELS, builder.pp("attn.c_proj"))?,
                ln_2: norm(&builder.pp("ln_2"))?,
                c_fc: linear(CHANNELS, 4 * CHANNELS, builder.pp("mlp.c_fc"))?,
                mlp_proj: linear(4 * CHANNELS, CHANNELS, builder.pp("mlp.c_proj"))?,
                cache: KvCache::new(2, CONTEXT),
            })
        };
        let head = builder.get((VOCAB, CHANNELS), "lm_head.weight")?;
        Ok(Self {
            wte: Embedding::new(head.clone(), CHANNELS),
            wpe: builder.get((CONTEXT, CHANNELS), "transformer.wpe.weight")?,
            blocks: (0..LAYERS).map(block).collect::<Result<_>>()?,
            ln_f: norm(&builder.pp("transformer.ln_f"))?,
            lm_head: Linear::new(head, None),
        })
    }

    /// Logits of the token after the last one of each sequence, `[batch, vocabulary]`; `tokens` are those from place `start` on.
    fn logits(&mut self, tokens: &Tensor, start: usize) -> Result<Tensor> {
        let time = tokens.dim(1)?;
        let mut x = self.wte.forward(tokens)?.broadcast_add(&self.wpe.narrow(0, start, time)?)?;
        for block in &mut self.blocks {
            x = (&x + block.attend(&block.ln_1.forward(&x)?, start)?)?;
            let hidden = block.c_fc.forward(&block.ln_2.forward(&x)?)?.gelu_erf()?;
            x = (x + block.mlp_proj.forward(&hidden)?)?;
        }
        self.lm_head.forward(&self.ln_f.forward(&x.i((.., time - 1))?.contiguous()?)?)
    }

    fn next(&mut self, tokens: &[Vec<i64>], start: usize) -> anyhow::Result<Vec<i64>> {
        let shape = (tokens.len(), tokens[0].len());
        let tokens = Tensor::from_vec(tokens.concat(), shape, &Device::Cpu)?;
        let next = self.logits(&tokens, start)?.argmax(D::Minus1)?.to_vec1::<u32>()?;
        Ok(next.into_iter().map(i64::from).collect())
    }

    fn clear(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.cache.reset());
    }

    fn run(&mut self, task: &GenerateTask) -> anyhow::Result<TaskReport> {
        let prompt = task.prompts.first().context("a task without prompts")?;
        let new_cache = || KvCache::new(2, CONTEXT); // those before may be of another batch
        self.blocks.iter_mut().for_each(|block| block.cache = new_cache());
        let first = Tensor::from_vec(prompt.clone(), (1, prompt.len()), &Device::Cpu)?;
        let logits = self.logits(&first, 0)?.flatten_all()?.to_vec1::<f32>()?;
        self.blocks.iter_mut().for_each(|block| block.cache = new_cache());
        task.run(logits, |is_there| {
            self.clear();
            let mut last = self.next(&task.prompts, 0)?;
            is_there();
            let mut tokens: Vec<Vec<i64>> = last.iter().map(|token| vec![*token]).collect();
            for place in prompt.len()..prompt.len() + task.new_tokens - 1 {
                let rows: Vec<Vec<i64>> = last.iter().map(|token| vec![*token]).collect();
                last = self.next(&rows, place)?;
                tokens.iter_mut().zip(&last).for_each(|(own, token)| own.push(*token));
            }
            Ok(tokens)
        })
    }
}

impl Block {
    fn attend(&mut self, x: &Tensor, start: usize) -> Result<Tensor> {
        let (batch, time, _) = x.dims3()?;
        let qkv = self.c_attn.forward(x)?;
        let by_head = |part: usize| {
            let part = qkv.narrow(D::Minus1, part * CHANNELS, CHANNELS)?;
            part.reshape((batch, time, HEADS, CHANNELS / HEADS))?.transpose(1, 2)?.contiguous()
        };
        let (keys, values) = self.cache.append(&by_head(1)?, &by_head(2)?)?;
        let scale = 1.0 / ((CHANNELS / HEADS) as f64).sqrt();
        let mut scores = (by_head(0)?.matmul(&keys.transpose(2, 3)?.contiguous()?)? * scale)?;
        if time > 1 {
            let hidden = |i: usize| {
                (0..start + time).map(move |j| if j > start + i { f32::NEG_INFINITY } else { 0.0 })
            };
            let mask: Vec<f32> = (0..time).flat_map(hidden).collect();
            scores = scores.broadcast_add(&Tensor::from_vec(mask, (time, start + time), &Device::Cpu)?)?;
        }
        let y = candle_nn::ops::softmax_last_dim(&scores)?.matmul(&values.contiguous()?)?;
        self.c_proj.forward(&y.transpose(1, 2)?.flatten_from(2)?)
    }
}
