//! Own data: the rows of a CSV file, and a network that predicts one of its columns. See docs/own_data.md.

use std::fs;
use std::path::Path;

use voltaic::prelude::*;

/// Some rows of the file.
struct Flats {
    features: Tensor, // [batch, 3]: area, rooms, floor
    rent: Tensor,     // [batch], in thousands
}

impl Batch for Flats {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> voltaic::Result<Tensor>) -> voltaic::Result<Self> {
        Ok(Self { features: f(self.features)?, rent: f(self.rent)? })
    }

    fn batch_size(&self) -> Option<usize> {
        self.features.batch_size()
    }
}

/// All rows, in memory.
struct Table {
    features: SharedTensor,
    rent: SharedTensor,
}

impl Table {
    fn read(file: &str) -> Result<Self> {
        let text = fs::read_to_string(file).with_context(|| format!("{file} cannot be read"))?;
        let mut values = Vec::new();
        for (line, row) in (1..).zip(text.lines()).skip(1) {
            let fields: Vec<&str> = row.split(',').collect();
            if fields.len() != 4 {
                bail!("{file}:{line}: {} fields, not 4", fields.len());
            }
            for field in fields {
                let number = field.parse::<f32>();
                values.push(number.with_context(|| format!("{file}:{line}: `{field}` is no number"))?);
            }
        }
        let values = Tensor::from_slice(&values).view([-1, 4]);
        let (features, rent) = (values.narrow(1, 0, 3), values.select(1, 3));
        Ok(Self { features: SharedTensor::new(&features), rent: SharedTensor::new(&rent) })
    }

    fn rows(&self, indices: &[usize]) -> Flats {
        let indices: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        let select = |column: &SharedTensor| column.get().index_select(0, &Tensor::from_slice(&indices));
        Flats { features: select(&self.features), rent: select(&self.rent) }
    }
}

impl Dataset for Table {
    type Batch = Flats;

    fn len(&self) -> usize {
        self.rent.get().size()[0] as usize
    }

    fn batch(&self, indices: &[usize], _rng: &mut StdRng) -> Result<Flats> {
        Ok(self.rows(indices))
    }
}

#[derive(Module)]
struct Net {
    mean: Buffer, // of each feature, saved with the weights
    std: Buffer,
    hidden: Linear,
    out: Linear,
}

impl Net {
    fn loss(&self, batch: &Flats) -> Result<Tensor> {
        let features = (&batch.features - self.mean.tensor()) / self.std.tensor();
        let rent = self.out.forward(&self.hidden.forward(&features)?.relu())?.squeeze_dim(1);
        Ok(mse_loss(&rent, &batch.rent)?)
    }
}

impl LightningModule for Net {
    type Batch = Flats;

    fn training_step(&self, batch: &Flats, ctx: &mut StepContext) -> Result<Tensor> {
        let loss = self.loss(batch)?;
        ctx.log("train_loss", &loss).prog_bar(true);
        Ok(loss)
    }

    fn validation_step(&self, batch: &Flats, ctx: &mut StepContext) -> Result<()> {
        ctx.log("val_loss", self.loss(batch)?).prog_bar(true);
        Ok(())
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(AdamW::new(1e-2).into())
    }
}

/// Stands for a file of yours.
fn write_flats(file: &str) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(42);
    let mut text = "area,rooms,floor,rent\n".to_owned();
    for _ in 0..1000 {
        let (area, floor) = (rng.random_range(20..160), rng.random_range(0..10));
        let rent = 0.2 + 0.01 * f64::from(area) + 0.03 * f64::from(floor);
        text += &format!("{area},{},{floor},{rent:.2}\n", 1 + area / 30);
    }
    Ok(fs::write(file, text)?)
}

fn main() -> Result<()> {
    seed_everything(42)?;
    if !Path::new("flats.csv").exists() {
        write_flats("flats.csv")?;
    }
    let table = Table::read("flats.csv")?;
    let (len, val) = (table.len(), table.len() / 5);
    let mut parts = random_split(table, &[len - val, val], 42)?;
    let (val, train) = (parts.remove(1), parts.remove(0));

    let known = train.dataset().rows(train.indices()).features; // of the training part alone
    let mut net = Net {
        mean: Buffer::new(known.mean_dim(0, false, Kind::Float)),
        std: Buffer::new(known.std_dim(0, true, false)),
        hidden: Linear::new(3, 32)?,
        out: Linear::new(32, 1)?,
    };
    let train = DataLoader::new(train).batch_size(32).shuffle(true).build()?;
    let val = DataLoader::new(val).batch_size(64).build()?;
    let builder = Trainer::builder().accelerator("auto").max_epochs(20).log_every_n_steps(5_u64);
    let mut trainer = builder.build()?;
    trainer.fit(&mut net, &mut Loaders::new().train(train).val(val))?;
    println!("val_loss {:.4}", trainer.metric("val_loss").unwrap_or(f64::NAN));
    Ok(())
}
