//! Hooks have the same names wherever they are listed.

use voltaic::module::{Hook, StepHook};

/// Names of hooks in a text, in the order of the text: what stands between `before` and `after`.
fn hooks_between<'a>(text: &'a str, before: &str, after: &str) -> Vec<&'a str> {
    let parts = text.split(before).skip(1).filter_map(|part| part.split(after).next());
    parts
        .filter(|name| name.starts_with("on_") && name.bytes().all(|b| b == b'_' || b.is_ascii_lowercase()))
        .collect()
}

/// The page, the two traits, the setters of `LambdaCallback` and the enums have the same hooks.
#[test]
fn hooks_have_the_same_names_everywhere() {
    let hooks = Hook::ALL.iter().map(|hook| hook.name()).chain(StepHook::ALL.iter().map(|hook| hook.name()));
    let mut expected: Vec<&str> = hooks.collect();
    expected.sort_unstable();
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let check = |what: &str, mut names: Vec<&str>| {
        names.sort_unstable();
        assert_eq!(names, expected, "{what}");
    };
    let page = read("../../docs/hooks.md");
    let table: String = page
        .lines()
        .skip_while(|line| *line != "## All hooks")
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.split('|').nth(1).unwrap_or_default())
        .collect();
    check("docs/hooks.md", hooks_between(&table, "`", "`"));
    // methods with a context and nothing else to work on
    let signatures = |text: &str| {
        text.split_whitespace().collect::<Vec<_>>().join(" ").replace("( &", "(&").replace(", )", ")")
    };
    let of = |text: &str, rest: [&str; 2]| {
        let all = signatures(text);
        let methods = all.split("fn ").skip(1).filter_map(|method| method.split_once('('));
        let methods = methods.filter(|(name, arguments)| {
            name.starts_with("on_") && rest.iter().any(|rest| arguments.starts_with(rest))
        });
        methods.map(|(name, _)| name.to_owned()).filter(|name| !name.ends_with("hook")).collect::<Vec<_>>()
    };
    let module = of(
        &read("src/lightning/module.rs"),
        ["&mut self, ctx: &mut HookContext) ->", "&self, ctx: &mut HookContext) ->"],
    );
    check("LightningModule", module.iter().map(String::as_str).collect());
    let callback = of(
        &read("src/lightning/callback.rs"),
        [
            "&mut self, ctx: &mut HookContext, module: &mut dyn Module) ->",
            "&mut self, ctx: &mut HookContext, module: &dyn Module) ->",
        ],
    );
    check("Callback", callback.iter().map(String::as_str).collect());
    let lambda = read("src/callback/lambda_callback.rs");
    let setters = lambda.split("setters! {").skip(1).filter_map(|part| part.split('}').next());
    let setters: Vec<&str> = setters
        .flat_map(|list| list.split(';').nth(1).unwrap_or_default().split(','))
        .filter_map(|pair| pair.split_whitespace().next())
        .collect();
    check("LambdaCallback", setters);
}
