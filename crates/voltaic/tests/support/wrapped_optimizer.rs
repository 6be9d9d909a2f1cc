//! Optimizers around another one.

/// The methods of [`Optimizer`](voltaic::optim::Optimizer) that a field answers: all that have no default, but `name` and `step`.
macro_rules! as_in {
    ($field:tt) => {
        fn zero_grad(&mut self) -> voltaic::Result<()> {
            self.$field.zero_grad()
        }

        fn param_groups(&self) -> &[voltaic::optim::ParamGroup] {
            self.$field.param_groups()
        }

        fn param_groups_mut(&mut self) -> &mut [voltaic::optim::ParamGroup] {
            self.$field.param_groups_mut()
        }

        fn state_dict(&self) -> voltaic::optim::OptimizerState {
            self.$field.state_dict()
        }

        fn load_state_dict(&mut self, state: voltaic::optim::OptimizerState) -> voltaic::Result<()> {
            self.$field.load_state_dict(state)
        }
    };
}
