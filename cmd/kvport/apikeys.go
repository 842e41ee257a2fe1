package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvport/kvport/engine/apikeys"
)

// apiKeysFlags are the flags of kvport keys api.
type apiKeysFlags struct {
	file          string
	format        string
	salt          string
	router, admin bool
	metrics       bool

	inFlight, requests, tokens int
}

// newAPIKeys is for the keys of clients, which have nothing to do with those that a deployment shares.
func newAPIKeys() *cobra.Command {
	f := &apiKeysFlags{}
	cmd := &cobra.Command{
		Use:   "api",
		Short: "Make and list the API keys of clients, for --api-key-file",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	for _, sub := range []*cobra.Command{f.newAdd(), f.newList()} {
		sub.Flags().StringVar(&f.file, "file", "", "file of API keys, as --api-key-file names it (required)")
		cmd.AddCommand(sub)
	}
	return cmd
}

func (f *apiKeysFlags) newAdd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "add NAME",
		Short: "Make a key for a client, print it once, and add its hash to the file",
		Long: "Make a key for a client, print it once, and add a line with the client's name and the hash of the key to the file, which is\n" +
			"made if there is none. SIGHUP makes kvport serve and route read the file again.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.file == "" {
				return errors.New("--file is required: the file of API keys")
			}
			options, err := f.options(cmd)
			if err != nil {
				return err
			}
			secret, err := apikeys.Add(f.file, args[0], options...)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), secret)
			return fail(err)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.salt, "salt", "", "tenant of the client: clients of one tenant share the cache (default NAME)")
	flags.BoolVar(&f.router, "router", false, "the client is a router, which says by cache_salt of which tenant each request is")
	flags.BoolVar(&f.admin, "admin", false, "the client may empty the cache, and do what --metrics permits")
	flags.BoolVar(&f.metrics, "metrics", false, "the client may read /metrics and the details of /health, which are about all tenants")
	flags.IntVar(&f.inFlight, "max-in-flight", 0, "requests that run at once; 0: no limit")
	flags.IntVar(&f.requests, "requests-per-minute", 0, "requests a minute; 0: no limit")
	flags.IntVar(&f.tokens, "tokens-per-minute", 0, "tokens of prompts and answers a minute; 0: no limit")
	return cmd
}

// options are the words of the line that the flags ask for.
func (f *apiKeysFlags) options(cmd *cobra.Command) (words []string, err error) {
	if cmd.Flags().Changed("salt") {
		words = append(words, "salt="+f.salt)
	}
	if f.router {
		words = append(words, "router")
	}
	if f.admin {
		words = append(words, "admin")
	}
	if f.metrics {
		words = append(words, "metrics")
	}
	for _, limit := range []struct {
		flag, word string
		value      int
	}{
		{"max-in-flight", "max_in_flight", f.inFlight},
		{"requests-per-minute", "requests_per_minute", f.requests},
		{"tokens-per-minute", "tokens_per_minute", f.tokens},
	} {
		switch {
		case limit.value < 0:
			return nil, fmt.Errorf("--%s is %d, want at least 0", limit.flag, limit.value)
		case limit.value > 0:
			words = append(words, fmt.Sprintf("%s=%d", limit.word, limit.value))
		}
	}
	return words, nil
}

func (f *apiKeysFlags) newList() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the clients of a file and what they may do, without keys",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.file == "" {
				return errors.New("--file is required: the file of API keys")
			}
			if err := checkFormat(f.format); err != nil {
				return err
			}
			keys, err := apikeys.Load(f.file)
			if err != nil {
				return fail(err)
			}
			return fail(f.write(cmd.OutOrStdout(), keys))
		},
	}
	cmd.Flags().StringVar(&f.format, "format", "text", "text or json")
	return cmd
}

// apiKeyLine is what is said of one client.
type apiKeyLine struct {
	Name     string `json:"name"`
	Tenant   string `json:"tenant,omitempty"` // empty: the client's cache_salt alone separates its blocks
	Router   bool   `json:"router,omitempty"`
	Admin    bool   `json:"admin,omitempty"`
	Metrics  bool   `json:"metrics,omitempty"`
	SHA256   string `json:"key_sha256"`
	InFlight int    `json:"max_in_flight,omitempty"`
	Requests int    `json:"requests_per_minute,omitempty"`
	Tokens   int    `json:"tokens_per_minute,omitempty"`
}

// write says who the clients of a file are.
func (f *apiKeysFlags) write(w io.Writer, keys *apikeys.Keys) error {
	all := keys.All()
	lines := make([]apiKeyLine, len(all))
	for i, k := range all {
		lines[i] = apiKeyLine{k.Name, k.Tenant, k.Router, k.Admin, k.Metrics, k.ID, k.Limits.InFlight, k.Limits.RequestsPerMinute, k.Limits.TokensPerMinute}
	}
	if f.format == "json" {
		return writeJSONLines(w, lines)
	}
	for i := range lines {
		if _, err := fmt.Fprintln(w, lines[i].text()); err != nil {
			return err
		}
	}
	return nil
}

func (l *apiKeyLine) text() string {
	words := []string{l.Name, "no tenant"}
	switch {
	case l.Router:
		words[1] = "router"
	case l.Tenant != "":
		words[1] = "tenant " + l.Tenant
	}
	if l.Admin {
		words = append(words, "admin")
	}
	if l.Metrics {
		words = append(words, "metrics")
	}
	for _, limit := range []struct {
		value int
		what  string
	}{{l.InFlight, "at once"}, {l.Requests, "requests a minute"}, {l.Tokens, "tokens a minute"}} {
		if limit.value > 0 {
			words = append(words, fmt.Sprintf("%d %s", limit.value, limit.what))
		}
	}
	return strings.Join(words, "  ")
}
