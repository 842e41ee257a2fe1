package acceptance

import (
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// goldenRequests are what the source of somebody else's router sends for one request of a client, written down by reading it.
type goldenRequests struct {
	Source      string      `json:"source"`
	Completions *goldenLegs `json:"completions"`
	Chats       *goldenLegs `json:"chats"` // nil: it has no path for them
}

type goldenLegs struct {
	Prefill sent `json:"prefill"`
	Decode  sent `json:"decode"`
}

// sent is one request. A header of a golden that begins with ^ is a pattern.
type sent struct {
	Headers map[string]string `json:"headers"`
	Body    fields            `json:"body"`
}

// differences are the headers and fields of a request that are not as they should be.
func (want sent) differences(got sent) (list []string) {
	for _, name := range union(want.Headers, got.Headers) {
		w, g := want.Headers[name], got.Headers[name]
		if w != g && (!strings.HasPrefix(w, "^") || !regexp.MustCompile(w).MatchString(g)) {
			list = append(list, headerField+name)
		}
	}
	list = append(list, differing("", want.Body, got.Body)...)
	slices.Sort(list)
	return list
}

// differing are the fields of two objects that differ. Those of kv_transfer_params count for themselves.
func differing(prefix string, want, got fields) (list []string) {
	for _, name := range union(want, got) {
		w, inWant := want[name]
		g, inGot := got[name]
		inner, isObject := w.(fields)
		others, areObjects := g.(fields)
		switch {
		case name == "kv_transfer_params" && isObject && areObjects:
			list = append(list, differing(paramsField, inner, others)...)
		case inWant != inGot || !reflect.DeepEqual(w, g):
			list = append(list, prefix+name)
		}
	}
	return list
}

// union are the keys of two maps.
func union[V any](a, b map[string]V) []string {
	all := map[string]bool{}
	for _, m := range []map[string]V{a, b} {
		for k := range m {
			all[k] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

// aClient is what a client asks a router for; the last part of a path says which.
func aClient(path string) string {
	const rest = `"min_tokens":2,"temperature":0.5,"stream":true,"stream_options":{"include_usage":true}}`
	if strings.Contains(path, "chat") {
		return `{"messages":[{"role":"user","content":"Hello"}],"max_completion_tokens":7,` + rest
	}
	return `{"prompt":"Once upon a time","max_tokens":7,` + rest
}

// anAnswer is a prefill engine's.
const anAnswer = `{"id":"cmpl-1","kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"P1",` +
	`"remote_block_ids":null,"remote_host":null,"remote_port":null,"kvport_ticket":"dGlja2V0"}}`

// ofTransport are the headers that are the HTTP library's and no router's.
func ofTransport() []string { return []string{"Accept-Encoding", "Content-Length", "User-Agent"} }

// sameID is what two requests of a router lack that have different ids.
const sameID = "both have one id"

// differences are what is not as it should be in the requests that two engines got.
func (want *goldenLegs) differences(got map[leg]sent) (list []string) {
	for to, one := range map[leg]sent{prefillLeg: want.Prefill, decodeLeg: want.Decode} {
		for _, field := range one.differences(got[to]) {
			list = append(list, string(to)+": "+field)
		}
	}
	if got[prefillLeg].Headers["X-Request-Id"] != got[decodeLeg].Headers["X-Request-Id"] {
		list = append(list, sameID)
	}
	slices.Sort(list)
	return list
}

// plantedChanges are each header and field of a request, left out and with another value, and one of each that its source does not have.
func (want sent) plantedChanges(to leg) (list []change) {
	for _, field := range want.all() {
		list = append(list, change{to: to, field: field, value: missing{}}, change{to: to, field: field, value: "planted"})
	}
	for _, field := range []string{headerField + "X-Planted", "planted", paramsField + "planted"} {
		if !strings.HasPrefix(field, paramsField) || paramsOf(want.Body) != nil {
			list = append(list, change{to: to, field: field, value: "planted"})
		}
	}
	return list
}

// recorded sends a client's request through a router, and gives what the engines behind it get.
func recorded(t *testing.T, f *foreign, path string) (got map[leg]sent) {
	t.Helper()
	got = map[leg]sent{}
	var mu sync.Mutex // each engine answers on its own
	engine := func(to leg, answer string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			one := sent{Headers: map[string]string{}}
			for name, values := range r.Header {
				if !slices.Contains(ofTransport(), name) {
					one.Headers[name] = strings.Join(values, ", ")
				}
			}
			data, err := io.ReadAll(r.Body)
			if err != nil || json.Unmarshal(data, &one.Body) != nil || r.URL.Path != path || r.Method != http.MethodPost {
				t.Errorf("%s %s: %s", r.Method, r.URL, data)
			}
			mu.Lock()
			got[to] = one
			mu.Unlock()
			_, _ = io.WriteString(w, answer)
		}))
		t.Cleanup(s.Close)
		return strings.TrimPrefix(s.URL, "http://")
	}
	x := &replica{foreign: f, p: engine(prefillLeg, anAnswer), d: engine(decodeLeg, "{}")}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, x.start(t)+path, strings.NewReader(aClient(path)))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer of-the-client")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusOK, resp.StatusCode)
	return got
}

// TestForeignRequests: the replicas send what the sources of the routers say, header by header and field by field, and any header or
// field that is another, or is not sent, is noticed.
func TestForeignRequests(t *testing.T) {
	routers := map[string]func() *foreign{"llm-d sidecar, shared-storage": sidecar}
	for name := range foreigners() {
		routers[name] = func() *foreign { return foreigners()[name] }
	}
	notLetters := regexp.MustCompile(`[^a-z0-9]+`)
	changed := 0
	for _, name := range slices.Sorted(maps.Keys(routers)) {
		file := filepath.Join("testdata", "foreign", notLetters.ReplaceAllString(strings.ToLower(name), "-")+".json")
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		var golden goldenRequests
		require.NoError(t, json.Unmarshal(data, &golden), file)
		require.Contains(t, golden.Source, "https://", file)
		require.Equal(t, routers[name]().noChats, golden.Chats == nil, file)
		for path, want := range map[string]*goldenLegs{"/v1/completions": golden.Completions, "/v1/chat/completions": golden.Chats} {
			if want == nil {
				continue
			}
			require.Empty(t, want.differences(recorded(t, routers[name](), path)), "%s %s", name, path)
			for _, one := range append(want.Prefill.plantedChanges(prefillLeg), want.Decode.plantedChanges(decodeLeg)...) {
				t.Run(name+" "+path+" "+one.String(), func(t *testing.T) {
					f := routers[name]()
					f.alter = one.apply
					noticed := []string{string(one.to) + ": " + one.field}
					if one.field == headerField+"X-Request-Id" {
						noticed = slices.Sorted(slices.Values(append(noticed, sameID)))
					}
					require.Equal(t, noticed, want.differences(recorded(t, f, path)))
				})
				changed++
			}
			plantedSteps(t, routers[name], path, want)
		}
	}
	t.Logf("%d routers, %d changes, each noticed", len(routers), changed)
}

// plantedSteps changes what a router does around the two requests: each has an id of its own, which looks as it should; the picker names the prefill
// engine elsewhere; the decode engine gets nothing of what the prefill engine has answered.
func plantedSteps(t *testing.T, router func() *foreign, path string, want *goldenLegs) {
	t.Helper()
	if f := router(); f.id != nil {
		f.alter = func(to leg, h http.Header, _ fields) {
			id, last := h.Get("X-Request-Id"), "0"
			if strings.HasSuffix(id, last) {
				last = "1"
			}
			if to == decodeLeg {
				h.Set("X-Request-Id", id[:len(id)-1]+last)
			}
		}
		require.Equal(t, []string{sameID}, want.differences(recorded(t, f, path)), f.name)
	}
	if f := router(); f.picker != "" {
		f.picker = "x-prefill-host-port"
		got := recorded(t, f, path)
		require.NotContains(t, got, prefillLeg, f.name)
		require.NotEmpty(t, want.differences(got), f.name)
	}
	if f := router(); !f.blind {
		f.decode = func(fields, fields) {}
		require.NotEmpty(t, want.differences(recorded(t, f, path)), f.name)
	}
}

// all are the headers and fields of a request.
func (want sent) all() (list []string) {
	for name := range want.Headers {
		list = append(list, headerField+name)
	}
	for name := range want.Body {
		if params := paramsOf(want.Body); name == "kv_transfer_params" {
			for inner := range params {
				list = append(list, paramsField+inner)
			}
			continue
		}
		list = append(list, name)
	}
	return list
}
