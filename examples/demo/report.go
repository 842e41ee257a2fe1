package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/kvport/kvport/internal/cluster"
)

// row is what is known of one prompt: the answers of the single node and of the pair, for the first
// and the second turn of the conversation.
type row struct {
	name                   string
	want, got, want2, got2 *cluster.Completion
	external               int
	bytes                  int64
	seconds                float64
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

func (r *row) gbps() float64 {
	if r.seconds == 0 {
		return 0
	}
	return float64(r.bytes) / r.seconds / 1e9
}

// print writes the table a person looks at.
func (d *demo) print(out io.Writer) {
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "prompt\ttokens\tfrom external KV\tTTFT single\tTTFT P/D\tTTFT second turn\tMB loaded\tGB/s\ttokens equal\t")
	ms := func(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }
	for i := range d.rows {
		r := &d.rows[i]
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\t%s\t%.1f\t%.2f\t%s\t\n", r.name, r.want.Prompt, r.external,
			ms(r.want.TTFT), ms(r.got.TTFT), ms(r.got2.TTFT), float64(r.bytes)/1e6, r.gbps(), r.verdict())
	}
	if r := &d.killed; r.got != nil {
		fmt.Fprintf(w, "%s\t%d\t\t%s\t%s\t\t\t\t%s\t\n", r.name, r.want.Prompt, ms(r.want.TTFT), ms(r.got.TTFT), r.verdict())
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
	ExternalTokens int     `json:"external_tokens"`
	Equal          bool    `json:"equal"`
	Bytes          int64   `json:"bytes"`
	GBps           float64 `json:"gb_per_second"`
	TTFTSingle     float64 `json:"ttft_single_ms"`
	TTFTSplit      float64 `json:"ttft_pd_ms"`
	TTFTSecond     float64 `json:"ttft_second_turn_ms"`
}

// write stores the results as JSON.
func (d *demo) write(path string) error {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }
	rec := record{Connector: d.connector, Model: filepath.Base(d.model), PluginKills: d.kills, KillEqual: d.killed.equal()}
	for i := range d.rows {
		r := &d.rows[i]
		rec.Prompts = append(rec.Prompts, promptRecord{
			Name: r.name, PromptTokens: r.want.Prompt, Generated: len(r.got.Tokens), ExternalTokens: r.external,
			Equal: r.equal(), Bytes: r.bytes, GBps: r.gbps(),
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
	external := 0
	for i := range d.rows {
		r := &d.rows[i]
		external += r.external
		if !r.equal() {
			errs = append(errs, fmt.Errorf("prompt %s: single node %v %v, P/D %v %v",
				r.name, r.want.Tokens, r.want2.Tokens, r.got.Tokens, r.got2.Tokens))
		}
		if r.external == 0 {
			errs = append(errs, fmt.Errorf("prompt %s: no KV was loaded", r.name))
		}
	}
	if !d.killed.equal() {
		errs = append(errs, errors.New("tokens differ after the plugin was killed"))
	}
	if d.kills == 0 {
		errs = append(errs, errors.New("the plugin was killed, but the engine counted no restart"))
	}
	if len(errs) == 0 {
		fmt.Printf("\nAll tokens equal; %d prompt tokens were loaded through %s.\n", external, d.connector)
	}
	return errors.Join(errs...)
}
