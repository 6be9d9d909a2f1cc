//! Text from a language model: the cache, graphs, devices and batches change nothing of what is generated.

use std::path::Path;
use std::process::Command;

use tch::{Kind, Tensor};
use voltaic::generation::{CausalLm, FinishReason, GenerationConfig, Generator, KvCache};
use voltaic::models::{Gpt, GptConfig};
use voltaic::nn::{Forward, ModuleExt};

const VOCAB: i64 = 23;

fn gpt(n_layer: i64, block_size: i64) -> Gpt {
    let config =
        GptConfig { vocab_size: VOCAB, block_size, n_layer, n_head: 2, n_embd: 16, dropout: 0.1, bias: true };
    let mut gpt = Gpt::new(config).unwrap();
    // of other sizes than at the start, so that contexts differ
    tch::no_grad(|| {
        for parameter in gpt.parameters() {
            let _ = parameter.shallow_clone().normal_(0.0, 0.4);
        }
    });
    gpt.eval();
    gpt
}

/// What nanoGPT's loop generates: the whole of the last tokens at each step, and the most likely next one.
fn by_full_passes(gpt: &Gpt, prompt: &[i64], tokens: usize) -> Vec<i64> {
    let mut all = prompt.to_vec();
    for _ in 0..tokens {
        let seen = &all[all.len().saturating_sub(gpt.config().block_size as usize)..];
        let logits = tch::no_grad(|| gpt.forward(&Tensor::from_slice(seen).unsqueeze(0)).unwrap());
        all.push(logits.select(1, -1).argmax(-1, false).int64_value(&[0]));
    }
    all.split_off(prompt.len())
}

fn greedy(max_new_tokens: usize) -> GenerationConfig {
    GenerationConfig { max_new_tokens, temperature: 0.0, ..GenerationConfig::default() }
}

fn tokens_of(gpt: &Gpt, config: GenerationConfig, prompts: &[Vec<i64>]) -> Vec<Vec<i64>> {
    let done = Generator::new(gpt, config).unwrap().generate(prompts).unwrap();
    done.sequences.into_iter().map(|sequence| sequence.tokens).collect()
}

/// Prompts of all lengths, below the context and beyond it, alone and together, with libtorch's kernels unless another test has put
/// voltaic's in, and with those.
#[test]
fn the_most_likely_tokens_are_those_of_full_passes() {
    let _rng = crate::rng::seeded(5);
    check_most_likely_tokens();
    assert!(voltaic::ffi::install_kernels().unwrap(), "this processor has no vectors");
    check_most_likely_tokens();
}

fn check_most_likely_tokens() {
    for (layers, context) in [(1, 9), (2, 16), (3, 40)] {
        let gpt = gpt(layers, context);
        let prompt = |len: i64| (0..len).map(|i| (i * i + 3 * len) % VOCAB).collect::<Vec<i64>>();
        let prompts: Vec<Vec<i64>> = [1, 4, 7, context - 1, context, context + 5].map(prompt).to_vec();
        let expected: Vec<Vec<i64>> = prompts.iter().map(|prompt| by_full_passes(&gpt, prompt, 20)).collect();
        for use_graph in [false, true] {
            let config = GenerationConfig { use_graph, ..greedy(20) };
            for (prompt, expected) in prompts.iter().zip(&expected) {
                let [alone] = &tokens_of(&gpt, config.clone(), std::slice::from_ref(prompt))[..] else {
                    panic!()
                };
                assert_eq!(alone, expected, "{layers} layers, {} tokens, graph {use_graph}", prompt.len());
            }
            for few in [&prompts[..3], &prompts[..]] {
                let together = tokens_of(&gpt, config.clone(), few);
                assert_eq!(together, expected[..few.len()], "{layers} layers, graph {use_graph}");
            }
        }
    }
}

#[test]
fn what_is_drawn_depends_on_seed_and_place_alone() {
    let _rng = crate::rng::seeded(6);
    let gpt = gpt(2, 32);
    let config =
        GenerationConfig { max_new_tokens: 15, top_k: Some(9), top_p: 0.95, ..GenerationConfig::default() };
    let prompts = [vec![1, 2, 3], vec![4], vec![5, 6]];
    let together = tokens_of(&gpt, config.clone(), &prompts);
    assert_eq!(tokens_of(&gpt, config.clone(), &prompts[..1])[0], together[0]);
    assert_eq!(tokens_of(&gpt, GenerationConfig { use_graph: true, ..config.clone() }, &prompts), together);
    assert_ne!(tokens_of(&gpt, GenerationConfig { seed: 1, ..config.clone() }, &prompts), together);
    let same = [vec![1, 2, 3], vec![1, 2, 3]];
    let [a, b] = &tokens_of(&gpt, config, &same)[..] else { panic!() };
    assert_ne!(a, b);
}

#[test]
fn sequences_end_by_length_or_stop_and_are_streamed() {
    let _rng = crate::rng::seeded(7);
    let gpt = gpt(1, 64);
    let prompts = [vec![3, 1], vec![2]];
    let full = tokens_of(&gpt, greedy(12), &prompts);
    // the first place where two tokens of the first sequence are not those of the second
    let stop = full[0][4..6].to_vec();
    let end = full[0].windows(2).position(|pair| pair == stop).unwrap() + 2;
    let config = GenerationConfig { stop: vec![vec![VOCAB], stop.clone()], ..greedy(12) };
    let mut streamed = vec![Vec::new(); 2];
    let mut generator = Generator::new(&gpt, config).unwrap().on_token(|index, token| {
        streamed[index].push(token);
        Ok(())
    });
    let done = generator.generate(&prompts).unwrap();
    drop(generator);
    assert_eq!(done.sequences[0].tokens, full[0][..end]);
    assert_eq!(done.sequences[0].finish_reason, FinishReason::Stop);
    let second = &done.sequences[1];
    assert!(full[1].starts_with(&second.tokens));
    assert_eq!(second.finish_reason == FinishReason::Stop, second.tokens.ends_with(&stop));
    assert_eq!(streamed, [done.sequences[0].tokens.clone(), second.tokens.clone()]);
    let error =
        Generator::new(&gpt, greedy(3)).unwrap().on_token(|_, _| anyhow::bail!("enough")).generate(&prompts);
    assert_eq!(error.unwrap_err().to_string(), "enough");
}

#[test]
fn what_cannot_be_generated_is_refused() {
    let mut gpt = gpt(1, 8);
    let refused = |gpt: &Gpt, prompts: &[Vec<i64>]| {
        Generator::new(gpt, greedy(2)).unwrap().generate(prompts).unwrap_err().to_string()
    };
    let cases: [(&[Vec<i64>], &str); 4] = [
        (&[], "there is no prompt"),
        (&[vec![1], vec![]], "prompt 1 has no tokens"),
        (&[vec![VOCAB]], "prompt 0 has token 23, the model has 23"),
        (&[vec![-1]], "prompt 0 has token -1"),
    ];
    for (prompts, text) in cases {
        assert_contains!(refused(&gpt, prompts), text, "; ");
    }
    gpt.train(true);
    assert!(refused(&gpt, &[vec![1]]).contains("training mode; call its eval() first"));
    let wrong = GenerationConfig {
        max_new_tokens: 0,
        temperature: f64::NAN,
        top_k: Some(0),
        top_p: 1.5,
        repetition_penalty: 0.0,
        stop: vec![vec![]],
        vocab_size: Some(0),
        ..GenerationConfig::default()
    };
    let error = wrong.check().unwrap_err();
    let keys: Vec<&str> = error.problems.iter().map(|problem| problem.key.as_str()).collect();
    let all = ["max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop", "vocab_size"];
    assert_eq!(keys, all);
}

/// A model whose next token is the sum of all it sees, by the keys in the cache.
#[derive(voltaic::Module)]
struct Sum {
    #[module(skip)]
    shape: Vec<i64>,
}

impl CausalLm for Sum {
    fn vocab_size(&self) -> i64 {
        10
    }

    fn context_length(&self) -> i64 {
        100
    }

    fn next_logits(&self, tokens: &Tensor, cache: &KvCache) -> anyhow::Result<Tensor> {
        let values = tokens.to_kind(Kind::Float).view([tokens.size()[0], 1, -1, 1]);
        // equal scores: the mean of all values, of as many as there are
        let mean = cache.attend(0, &values.zeros_like(), &values.zeros_like(), &values)?;
        let sum = cache.last(&mean.squeeze_dim(1))? * (cache.positions()?.select(1, -1) + 1).unsqueeze(1);
        let next = sum.round().remainder(10.0).to_kind(Kind::Int64).squeeze_dim(1);
        Ok(next.one_hot(10).to_kind(Kind::Float).view(if self.shape.is_empty() {
            &[-1, 10][..]
        } else {
            &self.shape
        }))
    }
}

#[test]
fn a_model_of_ones_own_generates() {
    let mut sum = Sum { shape: Vec::new() };
    sum.eval();
    let done = Generator::new(&sum, greedy(5)).unwrap().generate(&[vec![1, 2], vec![3]]).unwrap();
    // 1 2 3 6 2 4 8; 3 3 6 2 4 8
    assert_eq!(done.sequences[0].tokens, [3, 6, 2, 4, 8]);
    assert_eq!(done.sequences[1].tokens, [3, 6, 2, 4, 8]);
    sum.shape = vec![10, -1];
    let error =
        Generator::new(&sum, greedy(5)).unwrap().generate(&[vec![1], vec![2]]).unwrap_err().to_string();
    assert!(error.contains("[10, 2]") && error.contains("[2, 10]"), "{error}");
}

// ---- on the command line ----

/// Runs the command in a folder, on emulated HPUs where one is asked for; gives what it wrote to standard output and error.
pub fn voltaic(folder: &Path, arguments: &[&str]) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_voltaic"))
        .args(arguments)
        .current_dir(folder)
        .env("VOLTAIC_HPU", "emulator")
        .env("VOLTAIC_HPU_DEVICES", "2")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

const IN_FILES: [&str; 4] = [
    "--trainer.devices=2",
    "--trainer.strategy.offload_parameters=true",
    "--trainer.strategy.offload_params_device=nvme",
    "--trainer.strategy.nvme_path=nvme",
];
const TP_2: &str = "--trainer.strategy.tensor_parallel.tp_size=2";
const RUN: &str = "lightning_logs/version_0";
const TEXT: &str = "the cat sat on the mat and the dog ran to the hat of the cat, then sat. ";

/// A small GPT that reads text.txt.
pub const MODEL: &str = "--model=Gpt --model.n_layer=2 --model.n_embd=32 --model.block_size=24 --data=ShakespeareData \
    --data.text_file=text.txt --data.context_length=24 --data.batch_size=16 --trainer.enable_progress_bar=false";

/// Trains a small GPT until it knows this text, so that its likeliest letters do not hang on how a processor rounds, and gives the option that
/// names its checkpoint.
pub fn trained(folder: &Path, text: &str) -> String {
    std::fs::write(folder.join("text.txt"), text.repeat(40)).unwrap();
    let fit = "fit --trainer.graph=step --trainer.max_steps=200 --trainer.max_epochs=-1 --optimizer=AdamW --optimizer.lr=0.01";
    let fit: Vec<&str> = fit.split_whitespace().chain(MODEL.split_whitespace()).collect();
    let (is_ok, _, errors) = voltaic(folder, &fit);
    assert!(is_ok, "{errors}");
    let files = std::fs::read_dir(folder.join(RUN).join("checkpoints")).unwrap();
    let checkpoint =
        files.map(|file| file.unwrap().path()).find(|path| path.extension().unwrap() == "ckpt").unwrap();
    format!("--ckpt_path={}", checkpoint.display())
}

/// Trains a small GPT, and continues prompts with it: by each device, strategy and way to run the same text.
#[test]
fn the_command_line_continues_prompts() {
    let folder = tempfile::tempdir().unwrap();
    let path = trained(folder.path(), TEXT);
    let generate = |more: &[&str]| {
        let arguments = [&["generate", &path, "--max_new_tokens=40"][..], more].concat();
        let (is_ok, text, errors) = voltaic(folder.path(), &arguments);
        assert!(is_ok, "{arguments:?}: {errors}");
        (text, errors)
    };
    let prompt = ["--prompt=the cat", "--temperature=0.5", "--seed=3"];
    let (text, errors) = generate(&prompt);
    assert!(text.starts_with("the cat") && text.ends_with('\n') && text.chars().count() == 48, "{text:?}");
    assert!(errors.contains("40 tokens; ") && errors.contains("tokens/s"), "{errors}");
    let ways = [
        &["--graph"][..],
        &["--trainer.accelerator=hpu"],
        &["--trainer.accelerator=hpu", "--graph"],
        &["--trainer.devices=2", "--trainer.strategy=DeepSpeedStrategy", TP_2],
    ];
    let most_likely = ["--prompt=the cat", "--temperature=0"];
    let (expected, _) = generate(&most_likely);
    assert_ne!(expected, text);
    for more in ways {
        assert_eq!(generate(&[&most_likely[..], more].concat()).0, expected, "{more:?}");
        let (drawn, errors) = generate(&[&prompt[..], more].concat());
        assert_eq!(drawn, text, "{more:?}");
        // 7 tokens and 17 of 40, until the context of 24 is full: one by the prompt, one by the capture, and one by a last pass
        let has_graph = errors.contains("graphs of a token: 1 captured, 16 replays");
        assert_eq!(has_graph, more.contains(&"--graph"), "{more:?}: {errors}");
    }
    for more in [
        &["--trainer.devices=2", "--trainer.strategy=ddp"][..],
        &["--trainer.devices=2", "--trainer.strategy=deepspeed_stage_3"],
        &[&["--trainer.strategy=DeepSpeedStrategy", "--trainer.strategy.stage=3"][..], &IN_FILES].concat(),
        &[
            "--trainer.devices=2",
            "--trainer.accelerator=hpu",
            "--trainer.strategy=HPUDeepSpeedStrategy",
            TP_2,
        ],
    ] {
        assert_eq!(generate(&[&prompt[..], more].concat()).0, text, "{more:?}");
    }
    let (stopped, _) = generate(&[&prompt[..], &["--stop", "a"]].concat());
    let end = "the cat".len() + text["the cat".len()..].find('a').unwrap() + 1;
    assert_eq!(stopped, format!("{}\n", &text[..end]));
    let (two, _) = generate(&["--prompt", "the", "--prompt", "of the cat", "--temperature=0"]);
    for (line, prompt) in two.lines().zip(["the", "of the cat"]) {
        let (alone, _) = generate(&["--prompt", prompt, "--temperature=0"]);
        assert_eq!(format!("{line}\n"), alone);
    }

    let refused = |arguments: &[&str], parts: &[&str]| {
        let (is_ok, _, errors) = voltaic(folder.path(), &[&["generate"], arguments].concat());
        assert!(!is_ok && parts.iter().all(|part| errors.contains(part)), "{arguments:?}: {errors}");
    };
    let config = format!("--config={RUN}/config.yaml");
    refused(&[&path], &["--prompt"]);
    refused(&[&config, "--prompt=the"], &["ckpt_path", "not set", "--ckpt_path=FILE"]);
    refused(&[&path, "--prompt=~"], &["'~'", "is not one of"]);
    refused(&[&path, "--prompt=the", "--top_p=0"], &["top_p", "above 0"]);
    let sliced = ["--graph", "--trainer.devices=2", "--trainer.strategy=DeepSpeedStrategy", TP_2];
    refused(
        &[&[path.as_str(), "--prompt=the"][..], &sliced].concat(),
        &["divided among the ranks", "without graphs"],
    );
    refused(
        &["--prompt=a", "--model=LeNet", "--data=MnistData", "--ckpt_path=x"],
        &["LeNet is no language model"],
    );
}
