-- Move entries that cannot be read out of the keys that hold them.
-- Arguments: key, entry, reason for each. Returns how many were there.
local REMOVE = {zset = 'ZREM', set = 'SREM', hash = 'HDEL'}

local function remove(key, entry)
  local kind = type_of(key)
  if kind == 'list' then return call('LREM', key, 1, entry) end
  return REMOVE[kind] and call(REMOVE[kind], key, entry) or 0
end

local num_found = 0
for i = 1, #ARGV, 3 do
  local key, entry, reason = unpack(ARGV, i, i + 2)
  if remove(key, entry) > 0 then
    note(key, entry, reason)
    num_found = num_found + 1
  end
end
return num_found
