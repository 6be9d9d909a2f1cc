//! Where in a user's code something failed that tch reports from its own source.

use std::backtrace::Backtrace;
use std::fmt;
use std::path::Path;

/// Crates, and namespaces of C++, whose frames lie between a user's call and the failure.
const OTHERS: [&str; 11] =
    ["std", "core", "alloc", "anyhow", "tch", "torch_sys", "voltaic", "at", "c10", "torch", "caffe2"];

/// The function that calls a user's code; what is outside of it is not searched.
const GUARD: &str = "without_panic";

/// The file and line of a user's code, or its function in a program without line numbers; what is said of an error.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Place(String);

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Place {
    /// The innermost frame of a user's code; `None` if there is none, or nothing was captured.
    pub fn of(backtrace: &Backtrace) -> Option<Self> {
        Self::find(&backtrace.to_string())
    }

    /// In the text of a backtrace: a line for each frame, `3: name`, and one with its place, if it is known.
    fn find(text: &str) -> Option<Self> {
        let mut lines = text.lines().map(str::trim).peekable();
        while let Some(line) = lines.next() {
            let Some((number, name)) = line.split_once(": ") else { continue };
            if number.parse::<usize>().is_err() {
                continue;
            }
            let place = lines.next_if(|next| next.starts_with("at ")).map(|place| {
                let place = place.trim_start_matches("at ");
                place.rsplit_once(':').map_or(place, |(place, _)| place) // without the column
            });
            if name.contains(GUARD) {
                return None;
            }
            if is_users(name, place) {
                return Some(Self(place.map_or(name, |place| place.trim_start_matches("./")).to_owned()));
            }
        }
        None
    }
}

/// Whether a function is of another crate than those between. What was inlined has no crate in its name: its file says it.
fn is_users(name: &str, place: Option<&str>) -> bool {
    let name = name.trim_start_matches(['<', '&', '*', '(']).trim_start_matches("dyn ");
    let first = name.split("::").next().unwrap_or(name).split('[').next().unwrap_or(name); // a hash follows in some names
    let is_crate = first.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && name.contains("::");
    match place {
        _ if is_crate => !first.starts_with("__") && !OTHERS.contains(&first),
        Some(place) if place.contains(".rs:") => {
            let (file, own) =
                (place.rsplit_once(':').map_or(place, |(file, _)| file), env!("CARGO_MANIFEST_DIR"));
            let is_others = ["/rustc/", "/registry/src/", own].iter().any(|part| file.contains(part));
            !is_others && !Path::new(own).join(file).exists()
        }
        _ => false,
    }
}

/// What tch's panics say: libtorch's message, without the words of `unwrap` and the C++ stack.
pub(super) fn torch_message(text: &str) -> Option<String> {
    let (_, message) = text.split_once("on an `Err` value: Torch(\"")?;
    let message = match message.split_once("\\nException raised from") {
        Some((message, _)) => message,
        None => message.strip_suffix("\")").unwrap_or(message),
    };
    Some(message.replace("\\n", " ").replace("\\\"", "\"").replace("\\'", "'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_frame_is_the_innermost_one_within_the_guard() {
        let inner = "   0: unwrap<tch::Tensor, tch::TchError>\n             at /rustc/5/library/core/src/result.rs:12:3\n   \
                     1: <voltaic::nn::layers::linear::Linear as Forward>::forward\n   2: {closure#0}\n             at ./src/lib.rs:3:4\n";
        let guard = "   4: voltaic::trainer::session::hooks::without_panic\n             at ./hooks.rs:1:1\n   5: net::main\n";
        let of =
            |frames: &str| Place::find(&format!("{inner}{frames}{guard}")).map(|place| place.to_string());
        let step = "<net::Net as voltaic::lightning::LightningModule>::training_step";
        assert_eq!(
            of(&format!("   2: {step}\n             at ./src/net.rs:12:31\n")).as_deref(),
            Some("src/net.rs:12")
        );
        assert_eq!(of(&format!("   2: {step}\n")).as_deref(), Some(step));
        assert_eq!(of("   2: step<T>\n             at ./src/net.rs:7:9\n").as_deref(), Some("src/net.rs:7"));
        assert_eq!(
            of("   2: core::ops::function::FnOnce::call_once\n   3: __rustc::rust_begin_unwind\n"),
            None
        );
        assert_eq!(Place::find("disabled backtrace"), None);
    }

    #[test]
    fn panics_of_tch_say_what_libtorch_says() {
        let text = "called `Result::unwrap()` on an `Err` value: Torch(\"shape '[3, 7]' is \\\"invalid\\\"\\nException raised from x\\n\")";
        assert_eq!(torch_message(text).as_deref(), Some("shape '[3, 7]' is \"invalid\""));
        let text = "called `Result::unwrap()` on an `Err` value: Torch(\"no room (for 3)\")";
        assert_eq!(torch_message(text).as_deref(), Some("no room (for 3)"));
        assert_eq!(torch_message("a panic of a user"), None);
    }
}
