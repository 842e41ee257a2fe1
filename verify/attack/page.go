package main

import (
	"fmt"
	"slices"
	"strings"
)

// groupNames says what the column "for" of the page means.
func groupNames() [][2]string {
	return [][2]string{
		{"ports", "UCX's ports write memory"},
		{"digests", "digests that somebody makes again"},
		{"loopback", "ports on loopback that are open to every user"},
		{"plugins", "a plugin that does what its user may"},
		{"overload", "others are not served"},
		{"survivors", "a plugin that hides that its processes live"},
		{"tenants", "API keys and salts"},
		{"api-keys", "keys of APIs"},
		{"web-pages", "web pages"},
		{"router-memory", "memory of a router"},
		{"clocks", "clocks"},
		{"templates", "chat templates"},
		{"squatters", "folders and programs of others"},
		{"listeners", "what listens by default"},
		{"requests", "malformed requests"},
		{"slow-clients", "slow and leaving clients"},
		{"outgoing", "requests to other hosts"},
		{"tickets", "tickets and registrations"},
		{"holds", "holds that nobody fetches"},
		{"servers", "servers that lie"},
		{"shared-folders", "what lies in a shared folder"},
		{"models", "model files and configs"},
		{"tokenizer", "texts for the tokenizer"},
		{"scarcity", "machines that have little, processes that die"},
		{"leaks", "what is left after many faults"},
		{"other-users", "another user"},
		{"logs", "logs, descriptors and pinned binaries"},
		{"in-place", "what the trust level in-place permits"},
		{"other", "what none of these covers"},
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
	for _, group := range groupNames() {
		if slices.ContainsFunc(probes, func(p probe) bool { return p.group == group[0] }) {
			fmt.Fprintf(&b, "- %s: %s\n", group[0], group[1])
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
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", p.id, p.group, does, door)
	}
	return b.String()
}
