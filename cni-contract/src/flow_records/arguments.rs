//! Which records are wanted, as arguments of the commands that show them.

use clap::Args;

use super::Filter;

/// Of each such command.
#[derive(Debug, Clone, Default, Args)]
pub struct Conditions {
    /// Only flows with this address (in the tunnel, or a Service's), name of a certificate, or pod NAMESPACE/NAME at
    /// one end
    #[arg(long)]
    pub peer: Option<String>,
    /// Only flows to this port, before or after translation
    #[arg(long)]
    pub port: Option<u16>,
    /// Only flows of this protocol: tcp, udp, sctp, icmp, icmpv6, or its number
    #[arg(long, value_parser = Filter::protocol)]
    pub protocol: Option<u8>,
    /// Only flows that were allowed, refused, or would be refused by policies in audit
    #[arg(long, value_parser = ["allowed", "audit", "refused"])]
    pub verdict: Option<String>,
    /// Only flows seen since then, such as 90s, 15m or 2h ago
    #[arg(long, value_name = "TIME", value_parser = Filter::span_ms)]
    pub since: Option<u64>,
}

/// Of those that show records of several pods.
#[derive(Debug, Clone, Default, Args)]
pub struct ConditionsOfPods {
    /// Only what the instance of this pod recorded: NAMESPACE/NAME, or NAME
    #[arg(long)]
    pub pod: Option<String>,
    /// Only flows that this pod opened: NAMESPACE/NAME, or the name in its certificate
    #[arg(long, value_name = "POD")]
    pub from_pod: Option<String>,
    /// Only flows to this pod: NAMESPACE/NAME, or the name in its certificate
    #[arg(long, value_name = "POD")]
    pub to_pod: Option<String>,
    #[command(flatten)]
    conditions: Conditions,
}

impl Conditions {
    /// What they mean at this time, in milliseconds since 1970.
    #[must_use]
    pub fn filter(&self, now_ms: u64) -> Filter {
        Filter {
            peer: self.peer.clone(),
            port: self.port,
            protocol: self.protocol,
            verdict: self.verdict.clone(),
            since_ms: self.since.map(|since| now_ms.saturating_sub(since)),
            ..Filter::default()
        }
    }
}

impl ConditionsOfPods {
    /// What they mean at this time, in milliseconds since 1970, for records of one namespace or of all.
    #[must_use]
    pub fn filter(&self, namespace: Option<&str>, now_ms: u64) -> Filter {
        Filter {
            namespace: namespace.map(str::to_owned),
            pod: self.pod.clone(),
            from_pod: self.from_pod.clone(),
            to_pod: self.to_pod.clone(),
            ..self.conditions.filter(now_ms)
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        wanted: ConditionsOfPods,
    }

    #[test]
    fn each_argument_is_a_condition() {
        let words = "flows --pod web --from-pod shop/web --to-pod pay/db --peer 10.0.0.9 --port 5432 --protocol tcp \
                     --verdict refused --since 15m";
        let command = Command::try_parse_from(words.split_whitespace()).unwrap();
        let text = |text: &str| Some(text.to_owned());
        let expected = Filter {
            namespace: text("shop"),
            pod: text("web"),
            from_pod: text("shop/web"),
            to_pod: text("pay/db"),
            peer: text("10.0.0.9"),
            port: Some(5432),
            protocol: Some(6),
            verdict: text("refused"),
            since_ms: Some(100_000),
        };
        assert_eq!(command.wanted.filter(Some("shop"), 1_000_000), expected);
        let none = Command::try_parse_from(["flows"]).unwrap();
        assert_eq!(none.wanted.filter(None, 1_000_000), Filter::default());
    }
}
