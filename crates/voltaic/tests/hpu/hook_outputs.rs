//! What steps give to hooks on an emulated HPU, eagerly and by graphs.

use voltaic::module::Hook;
use voltaic::trainer::GraphMode;

use crate::silent::silent;
use crate::stages::{Stages, run};
use crate::support::start;

#[test]
fn hooks_of_all_stages_get_what_the_step_gave() {
    let _guard = start();
    for graph in [GraphMode::Off, GraphMode::Step] {
        let root = tempfile::tempdir().unwrap();
        let builder = silent().accelerator("hpu").devices(1).default_root_dir(root.path()).graph(graph);
        let (checks, replayed) = run(builder, &mut Stages::new(), 1);
        assert_eq!(replayed > 5, graph == GraphMode::Step, "{replayed}");
        let count = |hook| checks.count(hook);
        assert_eq!((count(Hook::OnTrainBatchEnd), count(Hook::OnValidationBatchEnd)), (20, 10));
        assert_eq!((count(Hook::OnTestBatchEnd), count(Hook::OnPredictBatchEnd)), (2, 2));
    }
}
