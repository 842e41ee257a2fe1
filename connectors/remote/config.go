// Package remote is a connector that keeps KV blocks in a Redis or Valkey server or cluster, where every
// engine that reaches it finds them. Without a server blocks stay in the plugin's own memory.
package remote

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/kvport/kvport/connector"
	store "github.com/kvport/kvport/connectors/internal/remote"
)

// Scope says that every engine which reaches the same server sees the same blocks. A config without a
// server has another one, see [Config.Scope].
const Scope = connector.ScopeShared

// The environment variables that the connector reads. Secrets have no place in a config, which ends up in
// process lists and logs.
const (
	UsernameVariable = "KVPORT_REMOTE_USERNAME"
	PasswordVariable = "KVPORT_REMOTE_PASSWORD"
)

// Environment names the variables that the plugin needs, for its manifest.
func Environment() []string { return []string{UsernameVariable, PasswordVariable} }

// Needs says that the plugin talks to a server, and names the files that it reads, for its manifest.
func Needs() connector.Needs {
	return connector.Needs{Network: true, Reads: []string{"url", "password_file", "tls_ca_file", "tls_cert_file", "tls_key_file"}}
}

// maxFile bounds a file with a password or a certificate, in bytes.
const maxFile = 1 << 20

// Config is the kv_connector_extra_config of this connector.
type Config struct {
	URL          string `json:"url,omitempty" jsonschema:"description=Server: redis://HOST:PORT/DB; rediss:// with TLS; redis-cluster://HOST:PORT\\,HOST:PORT; unix:///PATH. Empty: no server\\, blocks stay in this process."`
	Username     string `json:"username,omitempty" jsonschema:"description=ACL user; default: $KVPORT_REMOTE_USERNAME or the server's default user."`
	PasswordFile string `json:"password_file,omitempty" jsonschema:"description=File with the password; default: $KVPORT_REMOTE_PASSWORD."`

	TLSCA         string `json:"tls_ca_file,omitempty" jsonschema:"description=Certificates (PEM) that the server's is checked against; default: the system's."`
	TLSCert       string `json:"tls_cert_file,omitempty" jsonschema:"description=Our own certificate (PEM) for a server that asks for one."`
	TLSKey        string `json:"tls_key_file,omitempty" jsonschema:"description=Its private key (PEM)."`
	TLSServerName string `json:"tls_server_name,omitempty" jsonschema:"description=Name in the server's certificate; default: its host."`
	AllowPlain    bool   `json:"allow_plaintext,omitempty" jsonschema:"default=false,description=Talk without TLS to a server on another machine."`

	Prefix      string `json:"key_prefix,omitempty" jsonschema:"maxLength=256,default=kvport:,description=Begins every key."`
	TTL         int64  `json:"ttl_ms,omitempty" jsonschema:"minimum=0,default=0,description=Life of a block since it was last saved\\, in milliseconds. 0: until the server evicts it."`
	Timeout     int64  `json:"timeout_ms,omitempty" jsonschema:"minimum=10,maximum=600000,default=3000,description=Longest time of one exchange with the server\\, in milliseconds."`
	Connections int    `json:"connections,omitempty" jsonschema:"minimum=1,maximum=64,default=4,description=Exchanges of blocks at the same time."`
	MaxValue    int    `json:"max_value_bytes,omitempty" jsonschema:"minimum=1024,maximum=536870912,default=536870912,description=Larger blocks are not stored."`
	MemoryBytes int64  `json:"memory_bytes,omitempty" jsonschema:"minimum=1024,default=1073741824,description=Without a server: most bytes of blocks to keep. Those that were not used for longest go first."`
}

// bad is an error about a field.
func bad(field string, err error) error {
	return fmt.Errorf("%s: %w: %w", field, err, connector.ErrIncompatible)
}

// Validate reports the first field that cannot work. It reads no file.
func (c Config) Validate() error {
	if c.URL == "" {
		for field, set := range map[string]bool{
			"username": c.Username != "", "password_file": c.PasswordFile != "", "tls_ca_file": c.TLSCA != "", "tls_cert_file": c.TLSCert != "",
			"tls_key_file": c.TLSKey != "", "tls_server_name": c.TLSServerName != "", "allow_plaintext": c.AllowPlain, "ttl_ms": c.TTL != 0,
		} {
			if set {
				return bad(field, errors.New("is set, but url is not"))
			}
		}
		return nil
	}
	o, err := store.ParseURL(c.URL)
	if err != nil {
		return fmt.Errorf("url %w: %w", err, connector.ErrIncompatible)
	}
	files := []struct{ field, path string }{
		{"password_file", c.PasswordFile}, {"tls_ca_file", c.TLSCA}, {"tls_cert_file", c.TLSCert}, {"tls_key_file", c.TLSKey},
	}
	for _, f := range files {
		if f.path != "" && !filepath.IsAbs(f.path) {
			return bad(f.field, fmt.Errorf("is %q, want an absolute path", f.path))
		}
	}
	switch {
	case (c.TLSCert == "") != (c.TLSKey == ""):
		return bad("tls_cert_file and tls_key_file", errors.New("want both or neither"))
	case o.TLS == nil && (c.TLSCA != "" || c.TLSCert != "" || c.TLSServerName != ""):
		return bad("url", errors.New("has no TLS, but tls_ fields are set; write rediss://"))
	}
	if err := o.Private(); err != nil && !c.AllowPlain {
		return bad("url", fmt.Errorf("%w; write rediss:// for TLS, or set allow_plaintext", err))
	}
	return nil
}

// Scope implements what sdk.FromStore asks a config: who sees the blocks.
func (c Config) Scope() connector.Scope {
	if c.URL == "" {
		return connector.ScopeEngine
	}
	return Scope
}

// BeyondMachine implements what sdk.FromStore asks a config: what says that other machines see the blocks.
func (c Config) BeyondMachine() string {
	if c.URL == "" {
		return ""
	}
	o, err := store.ParseURL(c.URL)
	if err != nil || o.Beyond() == "" {
		return ""
	}
	return "url has the address " + o.Beyond()
}

// Open opens the store of a config. env's log is used for what an operator should know. Errors name
// the field and wrap connector.ErrIncompatible; none contains a password.
func Open(ctx context.Context, env connector.Env, c Config) (connector.Store, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if c.URL == "" {
		env.Log.Warn("url is empty: blocks stay in this plugin's memory, no other engine sees them and they end with it", "memory_bytes", c.MemoryBytes)
		memory := store.NewMemory(c.MemoryBytes)
		return &Store{memory, memory.Stats}, nil
	}
	o, err := c.options()
	if err != nil {
		return nil, err
	}
	o.Log = env.Log
	server, err := store.Open(ctx, o)
	if err != nil {
		return nil, err
	}
	return &Store{server, server.Stats}, nil
}

// Capabilities are the optional powers of a Store.
const Capabilities = connector.CanStat

// Store is a connector.Store on a server or in memory.
type Store struct {
	connector.Store
	stats func() store.Stats
}

// StatInfos declares what Stats gives.
func StatInfos() []connector.StatInfo { return store.Infos() }

// Stats implements connector.StatsSource.
func (s *Store) Stats(context.Context) ([]connector.Stat, error) { return s.stats().Values(), nil }

// options are those of the store.
func (c Config) options() (store.Options, error) {
	o, err := store.ParseURL(c.URL)
	if err != nil {
		return o, fmt.Errorf("url %w: %w", err, connector.ErrIncompatible)
	}
	o.Username, o.Prefix = c.Username, c.Prefix
	if o.Username == "" {
		o.Username = os.Getenv(UsernameVariable)
	}
	o.TTL, o.Timeout = time.Duration(c.TTL)*time.Millisecond, time.Duration(c.Timeout)*time.Millisecond
	o.Connections, o.MaxValue = c.Connections, c.MaxValue
	if err := c.password(&o); err != nil {
		return o, err
	}
	return o, c.tls(o.TLS)
}

// password finds the password: in the file, or in the environment.
func (c Config) password(o *store.Options) error {
	if c.PasswordFile == "" {
		o.Password, o.CredentialField = os.Getenv(PasswordVariable), PasswordVariable
		return nil
	}
	o.CredentialField = "password_file"
	text, err := readFile(c.PasswordFile)
	if err != nil {
		return bad("password_file", err)
	}
	if text = bytes.TrimSpace(text); len(text) == 0 {
		return bad("password_file", fmt.Errorf("%s is empty", c.PasswordFile))
	}
	o.Password = string(text)
	return nil
}

// tls fills in what the config says about certificates.
func (c Config) tls(t *tls.Config) error {
	if t == nil {
		return nil
	}
	t.ServerName = c.TLSServerName
	if c.TLSCA != "" {
		pem, err := readFile(c.TLSCA)
		if err != nil {
			return bad("tls_ca_file", err)
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(pem) {
			return bad("tls_ca_file", fmt.Errorf("%s has no certificate", c.TLSCA))
		}
	}
	if c.TLSCert != "" {
		pair, err := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey)
		if err != nil {
			return bad("tls_cert_file and tls_key_file", err)
		}
		t.Certificates = []tls.Certificate{pair}
	}
	return nil
}

// readFile reads a small file.
func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = fmt.Errorf("%s is larger than %d bytes", path, maxFile)
	}
	return data, err
}
