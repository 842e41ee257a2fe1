package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net"
	"strings"

	"github.com/kvport/kvport/engine/router"
	"github.com/kvport/kvport/engine/router/admission"
	"github.com/kvport/kvport/engine/router/policy"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/internal/strictjson"
)

// routeFile is the config file of kvport route. The schema of the tags is checked, and printed by kvport schema --route.
type routeFile struct {
	Instances []routeInstance `json:"instances" jsonschema:"description=Instances in addition to those of the flags."`
	Limits    *clientLimits   `json:"limits"    jsonschema:"description=What each client may use; instead of the flags --key-..., all of them."`
	Keys      []keyLimits     `json:"keys"      jsonschema:"description=API keys that have limits of their own."`

	Policy     *strictjson.Value `json:"policy"         jsonschema:"type=string,description=How instances are chosen; instead of the flags --policy and --policy-weights."`
	Weights    *strictjson.Value `json:"policy_weights" jsonschema:"type=object,description=How much each scorer of the policy counts; instead of --policy-weights."`
	SessionKey *strictjson.Value `json:"session_key"    jsonschema:"type=string,description=Where a request has the key of its session; instead of --session-key."`
}

type routeInstance struct {
	URL   strictjson.Value `json:"url"   jsonschema:"required,type=string,description=The base URL of an instance, or dns://NAME:PORT, or dns+srv://_SERVICE._tcp.NAME."`
	Role  string           `json:"role"  jsonschema:"required,enum=prefill,enum=decode,description=An instance that does both is listed twice."`
	Group strictjson.Value `json:"group" jsonschema:"type=string,description=With --mode replica: the group of the instance; both instances of a request are in one group."`
	Drain bool             `json:"drain" jsonschema:"description=The instance gets no new requests; those that run end."`
}

type clientLimits struct {
	InFlight int `json:"max_in_flight"       jsonschema:"minimum=0,description=Requests that run at once; further ones wait. 0: no limit."`
	Requests int `json:"requests_per_minute" jsonschema:"minimum=0,description=Requests a minute. 0: no limit."`
	Tokens   int `json:"tokens_per_minute"   jsonschema:"minimum=0,description=Tokens of prompts and answers a minute. 0: no limit."`
}

type keyLimits struct {
	Name   string           `json:"name"       jsonschema:"description=What people call the key; it has no effect."`
	SHA256 strictjson.Value `json:"key_sha256" jsonschema:"required,type=string,description=The SHA-256 of the key, 64 hexadecimal digits: printf %s KEY | sha256sum."`
	clientLimits
}

// limits are the ones that the flags or the file say.
func (l *clientLimits) limits() admission.Limits {
	return admission.Limits{InFlight: l.InFlight, RequestsPerMinute: l.Requests, TokensPerMinute: l.Tokens}
}

// strictRoute says how the file is read.
func strictRoute() strictjson.Options { return strictjson.Options{} }

// decodeRoute reads a config file. each is what clients may use if the file does not say; groups reports whether instances
// may have one.
func decodeRoute(text []byte, each admission.Limits, groups bool) (*router.Settings, error) {
	v, err := strictjson.Parse(text)
	if err != nil {
		return nil, err
	}
	var f routeFile
	if err := strictRoute().Decode(v, &f); err != nil {
		return nil, err
	}
	s := &router.Settings{Limits: router.Limits{Each: each, Keys: map[string]admission.Limits{}}}
	if f.Limits != nil {
		s.Limits.Each = f.Limits.limits()
	}
	if s.Instances, err = f.instances(groups); err != nil {
		return nil, err
	}
	if err := f.choosing(s); err != nil {
		return nil, err
	}
	for i := range f.Keys {
		id, err := f.Keys[i].id()
		if err != nil {
			return nil, err
		}
		if _, twice := s.Limits.Keys[id]; twice {
			return nil, f.Keys[i].SHA256.Errorf("appears twice")
		}
		s.Limits.Keys[id] = f.Keys[i].limits()
	}
	return s, nil
}

// instances are those of the file.
func (f *routeFile) instances(groups bool) (list []router.Instance, err error) {
	seen := map[string]bool{}
	for i := range f.Instances {
		one := &f.Instances[i]
		in := router.Instance{URL: textOf(&one.URL), Role: one.Role, Group: textOf(&one.Group), Drain: one.Drain}
		place, err := router.CheckInstance(in)
		switch {
		case err != nil:
			return nil, one.URL.Errorf("%w", err)
		case seen[place]:
			return nil, one.URL.Errorf("%q appears twice as %s", in.URL, in.Role)
		case in.Group != "" && !groups:
			return nil, one.Group.Errorf("groups are for --mode replica")
		}
		seen[place] = true
		list = append(list, in)
	}
	return list, nil
}

// choosing adds how instances are chosen, as far as the file says so.
func (f *routeFile) choosing(s *router.Settings) error {
	if f.Policy != nil {
		s.Policy = textOf(f.Policy)
		if _, err := policy.New(policy.Config{Policy: s.Policy}); err != nil {
			return f.Policy.Errorf("%w", err)
		}
	}
	if f.Weights != nil {
		if json.Unmarshal(f.Weights.Raw(), &s.Weights) != nil {
			return f.Weights.Errorf(`must have a number for each scorer, such as {"prefix": 1, "load": 1}`)
		}
		// With the policy of the flags the router tries them.
		if _, err := policy.New(policy.Config{Policy: s.Policy, Weights: s.Weights}); err != nil && s.Policy != "" {
			return f.Weights.Errorf("%w", err)
		}
	}
	if f.SessionKey != nil {
		s.SessionKey = textOf(f.SessionKey)
		if err := router.CheckSessionKey(s.SessionKey); err != nil {
			return f.SessionKey.Errorf("%w", err)
		}
	}
	return nil
}

// id is the key's in router.Limits.
func (k *keyLimits) id() (string, error) {
	id := strings.ToLower(textOf(&k.SHA256))
	if len(id) != 2*sha256.Size || strings.Trim(id, "0123456789abcdef") != "" {
		return "", k.SHA256.Errorf("is no SHA-256, want 64 hexadecimal digits: printf %%s KEY | sha256sum")
	}
	return id, nil
}

// textOf is the text of a value that is one.
func textOf(v *strictjson.Value) (s string) {
	_ = json.Unmarshal(v.Raw(), &s) // the schema says that it is a text
	return s
}

// file is the config file of the flags; none without --config.
func (f *routeFlags) file() router.File {
	return router.File{
		Path: f.config,
		Read: func(path string) ([]byte, error) { return host.ReadFile(path, maxConfig) },
		Decode: func(text []byte) (*router.Settings, error) {
			return decodeRoute(text, f.each.limits(), f.mode == "replica")
		},
	}
}

// routeSchema is the JSON Schema of the config file.
func routeSchema() ([]byte, error) {
	schema := strictRoute().Schema(&routeFile{})
	strictjson.AcceptTexts(schema)
	text, err := json.MarshalIndent(schema, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("schema: %w", err)
	}
	return text, nil
}

// checkFront refuses flags of the front that cannot work.
func (f *routeFlags) checkFront() error {
	for _, n := range []struct {
		flag         string
		value, least int
	}{
		{"max-in-flight", f.maxInFlight, 1},
		{"instance-max-in-flight", f.instanceInFlight, 0},
		{"queue-size", f.queueSize, 0},
		{"kv-index-blocks", f.indexBlocks, 1},
		{"attempts", f.attempts, 1},
		{"key-max-in-flight", f.each.InFlight, 0},
		{"key-requests-per-minute", f.each.Requests, 0},
		{"key-tokens-per-minute", f.each.Tokens, 0},
	} {
		if n.value < n.least {
			return fmt.Errorf("--%s is %d, want at least %d", n.flag, n.value, n.least)
		}
	}
	if possible := f.retryShare > 0 && f.retryShare <= 1; !possible { // NaN is neither
		return fmt.Errorf("--retry-budget is %v, want more than 0 and at most 1: retries for each request", f.retryShare)
	}
	if f.dnsServer == "" {
		return nil
	}
	if host, port, err := net.SplitHostPort(f.dnsServer); err != nil || host == "" || port == "" {
		return fmt.Errorf("--dns-server is %q, want HOST:PORT", f.dnsServer)
	}
	return nil
}

// dns is how the router finds instances by name.
func (f *routeFlags) dns() router.DNS {
	d := router.DNS{Interval: f.dnsInterval, Keep: f.dnsKeep}
	if f.dnsServer != "" {
		d.Resolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, f.dnsServer)
		}}
	}
	return d
}
