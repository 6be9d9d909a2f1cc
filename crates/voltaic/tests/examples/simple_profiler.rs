//! Reports on where the time went.

use crate::run;

const PROGRAM: &str = "simple_profiler";

#[test]
fn simple() {
    let ran = run(PROGRAM, "simple");
    let row: Vec<&str> = ran.out.split('|').map(str::trim).collect();
    assert_eq!((row[1], row[3]), ("forward", "60"), "{}", ran.out);
    let [mean, total] = [row[2], row[4]].map(|cell| cell.parse::<f64>().unwrap());
    assert!(mean > 0.0 && (total / (60.0 * mean) - 1.0).abs() < 0.01, "{}", ran.out);
    ran.assert_fell(0, "train_loss", 0.5);
}

#[test]
fn advanced() {
    let ran = run(PROGRAM, "advanced");
    // an action stands below the one that it is within
    let below = ran.out.lines().position(|row| row.contains("|      [Strategy]single_device.training_step"));
    let row = ran.out.lines().nth(below.unwrap() + 1).unwrap();
    assert!(row.starts_with("|        forward "), "{}", ran.out);
    let dump = std::fs::read_to_string(ran.folder.path().join("fit-report.json")).unwrap();
    let dump: serde_json::Value = serde_json::from_str(&dump).unwrap();
    assert!(dump.to_string().contains("\"forward\""), "{dump}");
}
