// Command program prints the names that only a running program knows: commands and flags, plugins with
// their config keys and statistics, keys of the transfer config, conformance cases and mutants. Package
// verify/names builds it with an overlay in which cmd/kvport and the plugins are packages that can be imported.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	command "github.com/kvport/kvport/cmd/kvport"
	"github.com/kvport/kvport/conformance"
	"github.com/kvport/kvport/conformance/mutants"
	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/simulate"
)

var out = bufio.NewWriter(os.Stdout)

// name prints one line of the golden.
func name(section, name string, detail ...string) {
	fmt.Fprintf(out, "%s\t%s\t%s\n", section, name, strings.Join(slices.DeleteFunc(detail, func(s string) bool { return s == "" }), " "))
}

func main() {
	commands(command.Root())
	for _, p := range plugins() {
		plugin(p.(connector.Plugin))
	}
	page, err := os.ReadFile("docs/transfer-config.md")
	check(err)
	words := regexp.MustCompile(`[a-z][a-z0-9_]+`).FindAllString(string(page), -1)
	slices.Sort(words)
	transferConfig(slices.Compact(words), "")
	for _, c := range conformance.Cases() {
		var profiles []string
		for _, p := range c.Profiles {
			profiles = append(profiles, string(p))
		}
		name("case", c.ID, c.Rule, strings.Join(profiles, ","))
	}
	for _, m := range mutants.All() {
		name("mutant", "conformance: "+m.Case+": "+m.Name)
	}
	for _, m := range simulate.Mutants() {
		name("mutant", "simulate: "+m.Name)
	}
	check(out.Flush())
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func commands(c *cobra.Command) {
	name("flag", c.CommandPath(), "command")
	c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) { flag(c, f) })
	c.PersistentFlags().VisitAll(func(f *pflag.Flag) { flag(c, f) })
	for _, sub := range c.Commands() {
		commands(sub)
	}
}

func flag(c *cobra.Command, f *pflag.Flag) {
	name("flag", c.CommandPath()+" --"+f.Name, f.Value.Type(), "default", f.DefValue)
}

// schema is what is read of a plugin's JSON schema.
type schema struct {
	Type       string            `json:"type"`
	Default    json.RawMessage   `json:"default"`
	Minimum    json.Number       `json:"minimum"`
	Maximum    json.Number       `json:"maximum"`
	Enum       []any             `json:"enum"`
	Properties map[string]schema `json:"properties"`
	Items      *schema           `json:"items"`
}

func plugin(p connector.Plugin) {
	name("plugin", p.Name, p.Capabilities.String())
	for _, alias := range p.Aliases {
		name("plugin", alias, "alias of", p.Name)
	}
	for _, variable := range p.Environment {
		name("config", p.Name+" $"+variable)
	}
	var s schema
	check(json.Unmarshal(p.Schema, &s))
	keys(p.Name+" ", &s)
	info, err := p.Describe(context.Background(), json.RawMessage("{}"))
	if err != nil {
		name("metric", p.Name, "statistics depend on the config")
		return
	}
	for _, i := range info.Stats {
		kind := "gauge"
		if i.Kind == connector.Counter {
			kind = "counter"
		}
		name("metric", p.Name+" kvport_connector_"+i.Name, kind, strings.Join(i.Labels, ","))
	}
}

func keys(path string, s *schema) {
	for key, p := range s.Properties {
		detail := []string{p.Type}
		if p.Items != nil {
			detail = append(detail, "of "+p.Items.Type)
			keys(path+key+"[].", p.Items)
		}
		if p.Minimum != "" || p.Maximum != "" {
			detail = append(detail, p.Minimum.String()+".."+p.Maximum.String())
		}
		if p.Enum != nil {
			detail = append(detail, fmt.Sprint(p.Enum))
		}
		if p.Default != nil {
			detail = append(detail, "default "+string(p.Default))
		}
		name("config", path+key, detail...)
		keys(path+key+".", &p)
	}
}

// transferConfig prints the keys that are known below a path, such as "kvport.deadlines.". Candidates
// are all words of the page about them; the decoder says which of them are keys.
func transferConfig(words []string, path string) {
	if known(path + "no_such_key") {
		return // not an object, or one that takes any key
	}
	for _, w := range words {
		if known(path + w) {
			name("config", path+w)
			transferConfig(words, path+w+".")
		}
	}
}

// known reports whether the decoder of the transfer config has a key.
func known(path string) bool {
	value := "[]"
	parts := strings.Split(path, ".")
	for _, part := range slices.Backward(parts) {
		value = fmt.Sprintf("{%q: %s}", part, value)
	}
	_, err := host.ParseConfig(value)
	return err == nil || !strings.Contains(err.Error(), "unknown field")
}
