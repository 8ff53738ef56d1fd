//! `nebula-proxy`: a host without root or tun in the overlay, with the configuration of `nebula`.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use nebula_config::go::flags;
use nebula_config::loaded::{Error, Loaded};
use nebula_enrolment::enrol::Files;
use nebula_enrolment::enrol::up::words;
use nebula_linux::{descriptors, memory};
use nebula_proxy::arguments::{FLAGS, Order, help};
use nebula_proxy::program;

fn main() -> ExitCode {
    // Before anything else: a join token among the words can be read by others until it is taken off.
    let up = words::take();
    memory::share_one_heap();
    if let Some(mut words) = up {
        words.insert(0, "-proxy".to_owned());
        return words::hand_over(words);
    }
    let parsed = match flags::parse(std::env::args().skip(1), FLAGS) {
        Ok(parsed) if parsed.is_set("help") => return print(&help()),
        Ok(parsed) => parsed,
        Err(flags::Error::Help) => return print(&help()),
        Err(error) => return misused(&error.to_string()),
    };
    if parsed.is_set("version") {
        return print(concat!("Version: ", env!("CARGO_PKG_VERSION"), "\n"));
    }
    let Some(path) = parsed.value("config").filter(|path| !path.is_empty()) else {
        return misused("-config FILE_OR_FOLDER is required");
    };
    match Order::read(&parsed) {
        Ok(order) => run(Path::new(path), &order),
        Err(error) => misused(&error),
    }
}

fn run(path: &Path, order: &Order) -> ExitCode {
    // Before any file is opened.
    let passed = descriptors::take_passed();
    let done = Loaded::read(path, |folder| drop(Files::new(folder).complete())).and_then(|loaded| match order {
        Order::Test { strict } => loaded.test(*strict),
        Order::Run(offers) => program::run(&loaded, offers, passed),
    });
    match done {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Error::BeforeLog(text)) => eprintln!("nebula-proxy: {text}"),
        Err(Error::Reported) => {}
        Err(Error::Start { message, cause }) => tracing::error!(error = cause, "{message}"),
        Err(other) => tracing::error!(error = %other, "Failed to start"),
    }
    ExitCode::FAILURE
}

fn misused(why: &str) -> ExitCode {
    eprintln!("nebula-proxy: {why}; see nebula-proxy -help");
    ExitCode::from(2)
}

fn print(text: &str) -> ExitCode {
    // A closed standard output is not an error.
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}
