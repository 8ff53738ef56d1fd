//! Reads the passphrase of a CA key from the environment, or from a terminal without echo.

use std::io::{Stdin, Write as _, stderr, stdin};
use std::os::unix::ffi::OsStringExt as _;

use anyhow::{Context as _, bail};
use nix::sys::termios::{LocalFlags, SetArg, SpecialCharacterIndices as Key, Termios, tcgetattr, tcsetattr};
use zeroize::Zeroizing;

/// Error messages for a missing passphrase, which depend on its purpose.
pub(crate) struct Asked {
    /// Standard input is not a terminal.
    pub(crate) no_terminal: &'static str,
    /// Nothing was typed at any of the prompts.
    pub(crate) never_given: &'static str,
}

/// Returns the passphrase from the environment, or prompts for it on the terminal at standard input.
pub(crate) fn ask(asked: &Asked) -> anyhow::Result<Zeroizing<Vec<u8>>> {
    if let Some(passphrase) = from_environment() {
        return Ok(passphrase);
    }
    for _ in 0..TRIES {
        let Ok(terminal) = Silent::new() else {
            bail!("{}, or with its passphrase in the environment variable {VARIABLE}", asked.no_terminal);
        };
        // If stderr is closed, nobody can see the prompt anyway.
        let _ = stderr().write_all(b"Enter passphrase: ");
        let passphrase = terminal.read_line().context("error reading passphrase");
        let _ = stderr().write_all(b"\n");
        let passphrase = passphrase?;
        if !passphrase.is_empty() {
            return Ok(passphrase);
        }
    }
    bail!(asked.never_given)
}

fn from_environment() -> Option<Zeroizing<Vec<u8>>> {
    let passphrase = Zeroizing::new(std::env::var_os(VARIABLE)?.into_vec());
    (!passphrase.is_empty()).then_some(passphrase)
}

/// The terminal on standard input with echo turned off; dropping this restores its settings.
struct Silent {
    input: Stdin,
    before: Termios,
}

impl Silent {
    fn new() -> nix::Result<Self> {
        let input = stdin();
        let before = tcgetattr(&input)?;
        let mut silent = before.clone();
        // Ctrl-C must not raise a signal, which would leave the shell's terminal without echo; it ends the line
        // instead.
        silent.local_flags.remove(LocalFlags::ECHO | LocalFlags::ISIG);
        silent.local_flags.insert(LocalFlags::ICANON);
        silent.control_chars[Key::VEOL as usize] = INTERRUPT;
        tcsetattr(&input, SetArg::TCSANOW, &silent)?;
        Ok(Self { input, before })
    }

    /// Reads one line, without the line ending.
    fn read_line(&self) -> anyhow::Result<Zeroizing<Vec<u8>>> {
        // Allocated once, so that growing leaves no partial copy behind.
        let mut line = Zeroizing::new(Vec::with_capacity(MAX_PASSPHRASE_LENGTH));
        let mut byte = Zeroizing::new([0]);
        loop {
            // Bypass the buffer of the standard library, which would keep a copy.
            if nix::unistd::read(&self.input, &mut *byte)? == 0 {
                bail!("the input has ended");
            }
            match byte[0] {
                INTERRUPT => bail!("interrupted"),
                b'\n' => break,
                _ if line.len() == MAX_PASSPHRASE_LENGTH => bail!("longer than {MAX_PASSPHRASE_LENGTH} bytes"),
                other => line.push(other),
            }
        }
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        Ok(line)
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        // Nothing can be done if this fails, and the process ends soon after.
        let _ = tcsetattr(&self.input, SetArg::TCSANOW, &self.before);
    }
}

const VARIABLE: &str = "NEBULA_CA_PASSPHRASE";
const TRIES: usize = 5;
// The longest line that a terminal delivers.
const MAX_PASSPHRASE_LENGTH: usize = 4096;
// Ctrl-C.
const INTERRUPT: u8 = 3;
