//! DeepSpeed's loss scale against its own; see fixtures/deepspeed/make_loss_scales.py.

use voltaic::precision::DynamicLossScaler;

use crate::optim::json_fixture;

#[test]
fn the_loss_scale_goes_through_deepspeeds_sequences() {
    let cases = json_fixture("../deepspeed/loss_scales.json");
    let mut failures = 0;
    for case in cases.as_array().unwrap() {
        let int = |key: &str| case[key].as_u64().unwrap();
        let mut scaler = DynamicLossScaler::new(
            int("power") as u32,
            int("window"),
            int("hysteresis"),
            case["consecutive"].as_bool().unwrap(),
            case["min"].as_f64().unwrap(),
        );
        let scales = case["scales"].as_array().unwrap();
        for (step, overflow) in case["overflows"].as_array().unwrap().iter().enumerate() {
            assert_eq!(scaler.get_scale(), scales[step].as_f64().unwrap(), "step {step} of {case}");
            // through its saved state at every step
            scaler = serde_json::from_str(&serde_json::to_string(&scaler).unwrap()).unwrap();
            match scaler.update(overflow.as_bool().unwrap()) {
                Ok(()) => assert_eq!(
                    scaler.get_scale(),
                    scales[step + 1].as_f64().unwrap(),
                    "step {step} of {case}"
                ),
                Err(error) => {
                    assert_eq!(step + 1, scales.len(), "{case}");
                    assert!(error.to_string().contains("overflow at the least loss scale, "), "{error}");
                    failures += 1;
                }
            }
        }
    }
    let expected = cases.as_array().unwrap().iter().filter(|case| case["failed"] == true).count();
    assert!(expected > 0 && failures == expected, "{failures} of {expected} end at the least scale");
}
