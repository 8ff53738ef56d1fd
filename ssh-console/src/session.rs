//! One channel of a session: a single command, or a shell.

use std::sync::{Arc, Weak};
use std::time::Duration;

use nebula_config::Sshd;
use russh::server::{Handle, Msg};
use russh::{Channel, ChannelMsg, Disconnect};
use tokio::time::{sleep, timeout};

use super::answers;
use super::commands::{self, Wish};
use super::terminal::{MAX_LINE_BYTES, Terminal, Typed};
use crate::Daemon;

/// What the commands of all sessions need.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) sshd: Sshd,
    pub(super) daemon: Weak<dyn Daemon>,
}

/// What happens after a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    Continue,
    Leave,
}

/// The client does not read, or has disconnected.
#[derive(Debug)]
struct Gone;

/// Serves a channel until it ends.
pub(super) async fn attend(mut channel: Channel<Msg>, context: &Arc<Context>, user: &str, handle: &Handle) {
    let left = serve(&mut channel, context, user).await;
    // As Go does, which knows no other status.
    let _ = channel.exit_status(0).await;
    let _ = channel.close().await;
    if let Ok(Then::Leave) = left {
        // A client that is disconnected at once loses the exit status.
        sleep(DISCONNECT_DELAY).await;
        let _ = handle.disconnect(Disconnect::ByApplication, String::new(), String::new()).await;
    }
}

async fn serve(channel: &mut Channel<Msg>, context: &Arc<Context>, user: &str) -> Result<Then, Gone> {
    let mut terminal = None;
    loop {
        let Ok(message) = timeout(IDLE_TIMEOUT, channel.wait()).await else {
            say(channel, "\r\nidle for too long\r\n").await?;
            return Ok(Then::Continue);
        };
        match message {
            Some(ChannelMsg::Exec { command, .. }) => {
                return match String::from_utf8(command).ok().filter(|line| line.len() <= MAX_LINE_BYTES) {
                    Some(line) => obey(channel, context, &line, str::to_owned).await,
                    None => say(channel, "the command is too long, or no text\n").await.map(|()| Then::Continue),
                };
            }
            Some(ChannelMsg::RequestShell { .. }) if terminal.is_none() => {
                let begun = Terminal::new(format!("{user}@nebula > "));
                say(channel, begun.prompt()).await?;
                terminal = Some(begun);
            }
            Some(ChannelMsg::Data { data }) => {
                let Some(terminal) = &mut terminal else { continue };
                for byte in data {
                    let Some(typed) = terminal.typed(byte) else { continue };
                    match typed {
                        Typed::Echo(text) => say(channel, &text).await?,
                        Typed::Complete(line) => complete(channel, terminal, &line).await?,
                        Typed::End => return say(channel, "\r\n").await.map(|()| Then::Continue),
                        Typed::Line(line) => {
                            say(channel, "\r\n").await?;
                            if obey(channel, context, &line, Terminal::shown).await? == Then::Leave {
                                return Ok(Then::Leave);
                            }
                            say(channel, terminal.prompt()).await?;
                        }
                    }
                }
            }
            Some(ChannelMsg::Eof) if terminal.is_some() => return Ok(Then::Continue),
            Some(ChannelMsg::Close) | None => return Err(Gone),
            Some(_) => {}
        }
    }
}

/// Completes the line if one command matches; otherwise lists the matches.
async fn complete(channel: &Channel<Msg>, terminal: &mut Terminal, line: &str) -> Result<(), Gone> {
    match commands::beginning_with(line)[..] {
        [only] => say(channel, &terminal.complete(format!("{only} "))).await,
        ref several => {
            let list = Terminal::shown(&format!("\n{}\n\n", several.join("\n")));
            say(channel, &format!("{list}{}", terminal.redrawn())).await
        }
    }
}

/// Runs the command in `line`. `shown` converts text for the client's terminal.
async fn obey(
    channel: &Channel<Msg>,
    context: &Arc<Context>,
    line: &str,
    shown: fn(&str) -> String,
) -> Result<Then, Gone> {
    let text = match commands::read(line) {
        Wish::Say(text) => text,
        Wish::Logout => return Ok(Then::Leave),
        Wish::Reload => {
            say(channel, &shown("Reloading config\n")).await?;
            // A reload that changes the console ends this session, so the line must be sent before it.
            sleep(RELOAD_DELAY).await;
            let daemon = context.daemon.upgrade().ok_or(Gone)?;
            let outcome = tokio::task::spawn_blocking(move || daemon.reload()).await;
            match outcome {
                Ok(Err(refusal)) => format!("nothing was changed: {refusal}\n"),
                _ => String::new(),
            }
        }
        Wish::Ask(question) => {
            let (daemon, context) = (context.daemon.upgrade().ok_or(Gone)?, Arc::clone(context));
            // The answer may have to wait for the control thread, or for a reload.
            let answered =
                tokio::task::spawn_blocking(move || answers::answer(&*daemon, &context.sshd.sandbox, question)).await;
            answered.map_err(|_| Gone)?
        }
    };
    say(channel, &shown(&text)).await.map(|()| Then::Continue)
}

async fn say(channel: &Channel<Msg>, text: &str) -> Result<(), Gone> {
    let written = timeout(WRITE_TIMEOUT, channel.data_bytes(text.as_bytes().to_vec())).await;
    written.map_err(|_| Gone)?.map_err(|_| Gone)
}

/// A session without input is closed after this time.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
const DISCONNECT_DELAY: Duration = Duration::from_millis(500);
const RELOAD_DELAY: Duration = Duration::from_millis(100);
