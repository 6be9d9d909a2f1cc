//! Own data: words of a text, some of them spelled backwards; a batch has words of different lengths. See docs/own_data.md.

use std::collections::BTreeSet;

use voltaic::data::ShakespeareData;
use voltaic::prelude::*;

/// Words of a text. Every second one is spelled backwards.
struct Words(Vec<String>);

impl Dataset for Words {
    /// Letters `[batch, longest]`, padded with 0; lengths `[batch]`; 1 for each word that is backwards, `[batch]`.
    type Batch = (Tensor, Tensor, Tensor);

    fn len(&self) -> usize {
        self.0.len()
    }

    fn batch(&self, indices: &[usize], _rng: &mut StdRng) -> Result<Self::Batch> {
        let lengths: Vec<i64> = indices.iter().map(|&index| self.0[index].len() as i64).collect();
        let backwards: Vec<i64> = indices.iter().map(|&index| index as i64 % 2).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut letters = Vec::new();
        for &index in indices {
            let mut word: Vec<i64> =
                self.0[index].bytes().map(|letter| i64::from(letter - b'a') + 1).collect();
            if index % 2 == 1 {
                word.reverse();
            }
            word.resize(longest as usize, 0);
            letters.extend(word);
        }
        let letters = Tensor::from_slice(&letters).view([-1, longest]);
        Ok((letters, Tensor::from_slice(&lengths), Tensor::from_slice(&backwards)))
    }
}

#[derive(Module)]
struct Net {
    embedding: Embedding,
    gru: Gru,
    out: Linear,
}

impl Net {
    /// Logits `[batch, 2]`, from the state after the last letter of each word.
    fn logits(&self, (letters, lengths, _): &(Tensor, Tensor, Tensor)) -> Result<Tensor> {
        let lengths = Vec::<i64>::try_from(lengths)?;
        let packed = PackedSequence::pack(&self.embedding.forward(letters)?, &lengths, true)?;
        let (_outputs, state) = self.gru.run_packed(&packed, None)?;
        self.out.forward(&state.get(0))
    }
}

impl LightningModule for Net {
    type Batch = (Tensor, Tensor, Tensor);

    fn training_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let loss = cross_entropy(&self.logits(batch)?, &batch.2)?;
        ctx.log("train_loss", &loss).prog_bar(true);
        Ok(loss)
    }

    fn validation_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> Result<()> {
        ctx.log("val_acc", accuracy(&self.logits(batch)?, &batch.2)?).prog_bar(true);
        Ok(())
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(AdamW::new(3e-3).into())
    }
}

fn main() -> Result<()> {
    seed_everything(42)?;
    let text = std::fs::read_to_string(ShakespeareData::default().text_file()?)?.to_lowercase(); // or your file
    let words: BTreeSet<&str> =
        text.split(|c: char| !c.is_ascii_lowercase()).filter(|word| word.len() > 2).collect();
    let (len, val) = (words.len(), words.len() / 5);
    let words = Words(words.into_iter().map(str::to_owned).collect());
    let mut parts = random_split(words, &[len - val, val], 42)?;
    let (val, train) = (parts.remove(1), parts.remove(0));
    let train = DataLoader::new(train).batch_size(64).shuffle(true).build()?;
    let val = DataLoader::new(val).batch_size(256).build()?;

    let embedding = Embedding::new(27, 16)?; // 26 letters, and 0 for none
    let gru = Gru::builder(16, 64).batch_first(true).build()?;
    let mut net = Net { embedding, gru, out: Linear::new(64, 2)? };
    let mut trainer = Trainer::builder().accelerator("auto").max_epochs(8).build()?;
    trainer.fit(&mut net, &mut Loaders::new().train(train).val(val))?;
    println!("val_acc {:.3}", trainer.metric("val_acc").unwrap_or(f64::NAN));
    Ok(())
}
