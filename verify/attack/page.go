package main

import (
	"fmt"
	"slices"
	"strings"
)

// rowNames says what the column row of the page means.
func rowNames() [][2]string {
	return [][2]string{
		{"C1", "UCX's ports write memory"},
		{"C2", "digests that somebody makes again"},
		{"C3", "ports on loopback that are open to every user"},
		{"C4", "a plugin that does what its user may"},
		{"C5", "others are not served"},
		{"H6", "a plugin that hides that its processes live"},
		{"M7", "API keys and salts"},
		{"M8", "keys of APIs"},
		{"M9", "web pages"},
		{"M10", "memory of a router"},
		{"M11", "clocks"},
		{"M12", "chat templates"},
		{"L13", "folders and programs of others"},
		{"listens", "what listens by default"},
		{"T1", "malformed requests"},
		{"T2", "slow and leaving clients"},
		{"T3", "requests to other hosts"},
		{"T4", "tickets and registrations"},
		{"T5", "holds that nobody fetches"},
		{"T6", "servers that lie"},
		{"T7", "what lies in a shared folder"},
		{"T8", "model files and configs"},
		{"T9", "texts for the tokenizer"},
		{"T10", "machines that have little, processes that die"},
		{"T11", "what is left after many faults"},
		{"T12", "another user"},
		{"T13", "logs, descriptors and pinned binaries"},
		{"in-place", "what the trust level in-place permits"},
		{"own", "what none of these covers"},
	}
}

// page is docs/attacks.md.
func page(probes []probe) string {
	var b strings.Builder
	doors, plugins := 0, 0
	for _, p := range probes {
		if p.door != "" {
			doors++
		}
		if strings.HasPrefix(p.id, "plugin/") {
			plugins++
		}
	}
	fmt.Fprintf(&b, `# Attacks

`+"`make attack`"+` runs kvport's binaries and attacks them: as a client, as a web page, as another user of the machine, as somebody who can write a store, as a server that lies, and
as the author of a plugin. Each of the %d probes below is one attack. It prints what it did and saw, and whether kvport held. %d of the probes are malicious
plugins, which run with the real model at trust level `+"`staged`"+`: no token may be wrong, no secret read, no port opened and no process left behind.

A probe with an *open door* is then run once more with a config that permits the attack, and must see it succeed: %d probes are known to be able to fail in this way.
Probes that need another user run as `+"`nobody`"+` and need root to become that; without root they are counted as not run, as are those for which this machine or this version of kvport lacks something.

`+"```sh"+`
make deps build
go run ./verify/attack                        # all of them; exit code 1 if one does not hold
go run ./verify/attack -run 'plugin/forge'    # some
go run ./verify/attack -sample 90s -seed 7    # as many as there is time for; make attack SAMPLE=90 has the commit pick them
`+"```"+`

*For* names what a probe belongs to:

`, len(probes), plugins, doors)
	for _, row := range rowNames() {
		if slices.ContainsFunc(probes, func(p probe) bool { return p.row == row[0] }) {
			fmt.Fprintf(&b, "- %s: %s\n", row[0], row[1])
		}
	}
	b.WriteString("\n| probe | for | what it does | open door |\n|---|---|---|---|\n")
	for _, p := range probes {
		door := p.door
		if door != "" {
			door = "`" + door + "`"
		}
		does := p.does
		if p.waits != "" {
			does += " (not run yet, it waits for this: " + p.waits + ")"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", p.id, p.row, does, door)
	}
	return b.String()
}
