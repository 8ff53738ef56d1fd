//! Reads a secret from the terminal on standard input, without showing it.

use std::io::{self, IsTerminal, Stdin, Write, stderr, stdin};

use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use zeroize::Zeroizing;

/// Asks for one line of at most `most` bytes; `None` if standard input is no terminal.
///
/// # Errors
/// Returns an error if the line is longer, was interrupted, or the terminal fails.
pub fn ask_silently(prompt: &str, most: usize) -> io::Result<Option<Zeroizing<String>>> {
    let input = stdin();
    if !input.is_terminal() {
        return Ok(None);
    }
    let silent = Silent::new(input)?;
    // Without a standard error nobody can see the prompt.
    let _ = stderr().write_all(prompt.as_bytes());
    let line = silent.read_line(most);
    let _ = stderr().write_all(b"\n");
    line.map(Some)
}

/// The terminal on standard input without echo and line editing, which limits lines to 4095 bytes; dropping this
/// restores its settings.
struct Silent {
    input: Stdin,
    before: Termios,
}

impl Silent {
    fn new(input: Stdin) -> io::Result<Self> {
        let before = tcgetattr(&input)?;
        let mut silent = before.clone();
        // Ctrl-C must not raise a signal, which would leave the shell's terminal without echo.
        silent.local_flags.remove(LocalFlags::ECHO | LocalFlags::ISIG | LocalFlags::ICANON);
        tcsetattr(&input, SetArg::TCSANOW, &silent)?;
        Ok(Self { input, before })
    }

    fn read_line(&self, most: usize) -> io::Result<Zeroizing<String>> {
        // Allocated once, so that growing leaves no partial copy behind.
        let mut line = Zeroizing::new(Vec::with_capacity(most));
        let mut byte = Zeroizing::new([0]);
        loop {
            // Bypasses the buffer of the standard library, which would keep a copy.
            if nix::unistd::read(&self.input, &mut *byte)? == 0 {
                break;
            }
            match byte[0] {
                b'\r' | b'\n' | END => break,
                INTERRUPT | QUIT => return Err(io::Error::new(io::ErrorKind::Interrupted, "interrupted")),
                BACKSPACE | DELETE => drop(line.pop()),
                CLEAR => line.clear(),
                _ if line.len() == most => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, format!("longer than {most} bytes")));
                }
                other => line.push(other),
            }
        }
        let text =
            std::str::from_utf8(&line).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is no text"))?;
        Ok(Zeroizing::new(text.to_owned()))
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        // Nothing can be done if this fails.
        let _ = tcsetattr(&self.input, SetArg::TCSANOW, &self.before);
    }
}

// Ctrl-C, Ctrl-D, Ctrl-\, and the keys that edit a line.
const INTERRUPT: u8 = 3;
const END: u8 = 4;
const QUIT: u8 = 28;
const BACKSPACE: u8 = 8;
const DELETE: u8 = 127;
const CLEAR: u8 = 21;
