package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/kvport/kvport/verify/cluster"
)

// row is what is known of one prompt: the answers of the single node and of the pair, for the first
// and the second turn of the conversation.
type row struct {
	name                   string
	want, got, want2, got2 *cluster.Completion
	first, second          moved
}

func (r *row) equal() bool {
	return r.got != nil && r.got.Equal(r.want) && (r.want2 == nil || r.got2 != nil && r.got2.Equal(r.want2))
}

func (r *row) verdict() string {
	if r.equal() {
		return "equal"
	}
	return "DIFFERENT"
}

// print writes the table a person looks at.
func (d *demo) print(out io.Writer) {
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "prompt\ttokens\tby\tfrom external KV\tTTFT single\tTTFT P/D\tTTFT second turn\tMB loaded\tin\tGB/s\ttokens equal\t")
	ms := func(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }
	for i := range d.rows {
		r := &d.rows[i]
		fmt.Fprintf(w, "%s\t%d\t%s\t%d\t%s\t%s\t%s\t%.1f\t%s\t%.2f\t%s\t\n", r.name, r.want.Prompt, r.first.via, r.first.external,
			ms(r.want.TTFT), ms(r.got.TTFT), ms(r.got2.TTFT), float64(r.first.bytes)/1e6, ms(r.first.time()), r.first.gbps(), r.verdict())
	}
	if r := &d.killed; r.got != nil {
		fmt.Fprintf(w, "%s\t%d\t\t\t%s\t%s\t\t\t\t\t%s\t\n", r.name, r.want.Prompt, ms(r.want.TTFT), ms(r.got.TTFT), r.verdict())
	}
	w.Flush()
}

// record is demo.json.
type record struct {
	Connector   string         `json:"connector"`
	Model       string         `json:"model"`
	Prompts     []promptRecord `json:"prompts"`
	PluginKills int            `json:"plugin_kills"`
	KillEqual   bool           `json:"plugin_kill_equal"`
}

type promptRecord struct {
	Name           string  `json:"name"`
	PromptTokens   int     `json:"prompt_tokens"`
	Generated      int     `json:"generated_tokens"`
	By             string  `json:"by"` // the engines of the first turn
	ExternalTokens int     `json:"external_tokens"`
	Equal          bool    `json:"equal"`
	Bytes          int64   `json:"bytes"`
	LoadMS         float64 `json:"load_ms"`
	GBps           float64 `json:"gb_per_second"`
	SecondBy       string  `json:"second_turn_by"`
	SecondExternal int     `json:"second_turn_external_tokens"`
	SecondBytes    int64   `json:"second_turn_bytes"`
	TTFTSingle     float64 `json:"ttft_single_ms"`
	TTFTSplit      float64 `json:"ttft_pd_ms"`
	TTFTSecond     float64 `json:"ttft_second_turn_ms"`
}

// write stores the results as JSON.
func (d *demo) write(path string) error {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }
	rec := record{Connector: d.connector, Model: filepath.Base(d.model), PluginKills: d.kills, KillEqual: d.strikes && d.killed.equal()}
	for i := range d.rows {
		r := &d.rows[i]
		rec.Prompts = append(rec.Prompts, promptRecord{
			Name: r.name, PromptTokens: r.want.Prompt, Generated: len(r.got.Tokens), By: r.first.via, ExternalTokens: r.first.external,
			Equal: r.equal(), Bytes: r.first.bytes, LoadMS: ms(r.first.time()), GBps: r.first.gbps(),
			SecondBy: r.second.via, SecondExternal: r.second.external, SecondBytes: r.second.bytes,
			TTFTSingle: ms(r.want.TTFT), TTFTSplit: ms(r.got.TTFT), TTFTSecond: ms(r.got2.TTFT),
		})
	}
	data, err := json.MarshalIndent(rec, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(data, '\n'), 0o644)
}

// verdict is an error if the demo did not show what it should.
func (d *demo) verdict() error {
	var errs []error
	external, pairs := 0, map[string]bool{}
	for i := range d.rows {
		r := &d.rows[i]
		external += r.first.external
		if !r.equal() {
			errs = append(errs, fmt.Errorf("prompt %s: single node %v %v, P/D %v %v",
				r.name, r.want.Tokens, r.want2.Tokens, r.got.Tokens, r.got2.Tokens))
		}
		if r.first.external == 0 {
			errs = append(errs, fmt.Errorf("prompt %s: no KV was loaded", r.name))
		}
		for _, m := range []*moved{&r.first, &r.second} {
			if m.external > 0 {
				pairs[m.via] = true
			}
		}
	}
	if want := min(2*len(d.rows), engines*engines); !d.alone() && len(pairs) < want {
		errs = append(errs, fmt.Errorf("%d pairs of engines handed over KV, want %d: %v", len(pairs), want, slices.Sorted(maps.Keys(pairs))))
	}
	if d.strikes && !d.killed.equal() {
		errs = append(errs, errors.New("tokens differ after the plugin was killed"))
	}
	if d.strikes && d.kills == 0 {
		errs = append(errs, errors.New("the plugin was killed, but the engine counted no restart"))
	}
	if len(errs) == 0 {
		fmt.Printf("\nAll tokens equal; %d prompt tokens were loaded through %s.\n", external, d.connector)
	}
	return errors.Join(errs...)
}
